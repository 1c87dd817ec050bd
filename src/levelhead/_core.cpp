// The binding: the functions of the Python module _core, on Python arrays. No arithmetic and no policy. The caller has
// checked the arguments (scoring.py, arrays.py); this file checks again only what memory safety needs. Plain calls have a
// function of their own (_fast_call.cpp); all others use forward and backward here.
//
// Arrays use the buffer protocol: any strides in bytes, read-only memory, no copies. bfloat16 has no buffer format and is
// passed as its bits in uint16.
#include <nanobind/nanobind.h>

#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>

#include "_arrays.h"
#include "_binding.h"
#include "_shared.h"
#include "attention.h"
#include "dispatch.h"
#include "machine.h"
#include "state.h"
#include "threads.h"

using namespace levelhead;

namespace {

// On which threads a call runs.
struct Threads {
  explicit Threads(Options& options)
      : count(options.get("threads", 1)), torchs_team(options.get("torchs_team", false)) {}
  const int count;
  const bool torchs_team;
};

constexpr auto written_forward = {"out", "logsumexp", "acc", "sums", "counts"};
constexpr auto written_backward = {"dq", "dk", "dv", "dmask", "dsinks", "dscale", "dadditive"};

void forward_arrays(nb::handle q, nb::handle k, nb::handle v, const nb::kwargs& keywords) {
  Buffers buffers;
  Options options(keywords, buffers, written_forward);
  Results results(options);
  const Threads threads(options);
  const Given given(buffers.memory(q, "q"), buffers.memory(k, "k"), buffers.maybe(v, "v"), options);
  options.end();
  const Result result = results.of(given);
  run(threads.count, threads.torchs_team,
      [&](Interrupt& interrupt) { return forward(given.problem, result, threads.count, interrupt); });
}

void backward_arrays(nb::handle dout, nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle logsumexp,
                     const nb::kwargs& keywords) {
  Buffers buffers;
  Options options(keywords, buffers, written_backward);
  Slopes slopes(buffers.memory(dout, "dout"), buffers.memory(out, "out"), buffers.memory(logsumexp, "logsumexp"), options);
  const Threads threads(options);
  Given given(buffers.memory(q, "q"), buffers.memory(k, "k"), buffers.maybe(v, "v"), options);
  options.end();
  const Gradients gradients = slopes.of(given);
  run(threads.count, threads.torchs_team,
      [&](Interrupt& interrupt) { return backward(given.problem, gradients, threads.count, interrupt); });
}

void finish_arrays(nb::handle acc_, nb::handle sums_, nb::handle sinks_, nb::handle out_) {
  Buffers buffers;
  Array acc(buffers.memory(acc_, "acc"), "acc"), sums(buffers.memory(sums_, "sums"), "sums"),
      out(buffers.memory(out_, "out", true), "out");
  MaybeArray sinks(buffers.maybe(sinks_, "sinks"), "sinks");
  const int rank = acc.rank();
  require(rank >= 2 && out.shape() == acc.shape(), "acc and out differ in shape");
  const std::int64_t H = rank >= 3 ? acc.size(-3) : 1, T = acc.size(-2), E = acc.size(-1);
  const Shape rows = [&] { Shape s = acc.shape(); s.pop_back(); return s; }();
  const std::int64_t B = product(rows, rank >= 3 ? rank - 3 : 0);
  const void* states = sums.contiguous<void>(extended(rows, row_sums), sums.format() == acc.format());
  const void* values = acc.contiguous<void>(acc.shape(), acc.dtype() == DType::f32 || acc.dtype() == DType::f64);
  const double* extra = sinks.doubles({H});
  const MutableTensor target = out.tensor<char>();
  nb::gil_scoped_release release;
  finish({B, H, T, E, acc.dtype(), values, states}, extra, target);
}

// The states of some rows.
template <class Real>
struct StateRows {
  Real* sums;
  std::int64_t* counts;
  Real* acc;  // E numbers a row, or null
};

// Row by row: a's keys, then b's, which begin `shift` positions later.
template <class Real>
void merge_rows(const StateRows<Real>& from_a, const StateRows<Real>& from_b, std::int64_t shift, std::int64_t rows, std::int64_t E,
                const StateRows<Real>& to) {
  for (std::int64_t i = 0; i < rows; ++i) {
    Row<Real> a = load_row(from_a.sums + i * row_sums, from_a.counts + i * row_counts);
    Row<Real> b = load_row(from_b.sums + i * row_sums, from_b.counts + i * row_counts);
    if (b.argmax != no_key) b.argmax += shift;
    if (shift > 0) b.first = -Row<Real>::infinity;
    const Share<Real> share = merge(a, b);
    settle(a);
    store_row(a, to.sums + i * row_sums, to.counts + i * row_counts);
    for (std::int64_t c = i * E; to.acc && c < (i + 1) * E; ++c)
      to.acc[c] = (share.a == 0 ? Real(0) : share.a * from_a.acc[c]) + (share.b == 0 ? Real(0) : share.b * from_b.acc[c]);
  }
}

// The arrays of a state; acc may be None.
struct StateArrays {
  StateArrays(Buffers& buffers, nb::handle sums_, nb::handle counts_, nb::handle acc_, bool writable = false)
      : sums(buffers.memory(sums_, "sums", writable), "sums"),
        counts(buffers.memory(counts_, "counts", writable), "counts"),
        acc(buffers.maybe(acc_, "acc", writable), "acc") {}

  template <class Real>
  StateRows<Real> rows(const Shape& shape, std::int64_t E, char format) {
    return {sums.contiguous<Real>(extended(shape, row_sums), sums.format() == format),
            counts.contiguous<std::int64_t>(extended(shape, row_counts), counts.is_integers()),
            acc.contiguous<Real>(extended(shape, E), !acc || acc->format() == format)};
  }

  Array sums, counts;
  MaybeArray acc;
};

void merge_arrays(StateArrays& a, StateArrays& b, std::int64_t shift, StateArrays& to) {
  const Shape shape = [&] { Shape s = a.sums.shape(); s.pop_back(); return s; }();
  const std::int64_t n = product(shape, shape.size()), E = to.acc ? to.acc->size(-1) : 0;
  require(!to.acc == !a.acc && !to.acc == !b.acc, "either all states have acc or none");
  const auto run = [&](auto zero, char format) {
    using Real = decltype(zero);
    merge_rows<Real>(a.rows<Real>(shape, E, format), b.rows<Real>(shape, E, format), shift, n, E, to.rows<Real>(shape, E, format));
  };
  if (a.sums.format() == 'd') return run(double(), 'd');
  run(float(), 'f');
}

void exponential_array(nb::handle x_, nb::handle y_) {
  Buffers buffers;
  Array x(buffers.memory(x_, "x"), "x"), y(buffers.memory(y_, "out", true), "out");
  require(x.format() == y.format(), "x and out differ in type");
  exponential(x.dtype(), x.contiguous<void>(x.shape(), true), y.contiguous<void>(x.shape(), true), product(x.shape(), x.rank()));
}

std::int64_t burn_threads(std::int64_t rounds, int threads) {
  nb::gil_scoped_release release;
  return burn(rounds, threads);
}

double sweep_array(nb::handle x_, std::int64_t piece, int threads) {
  Buffers buffers;
  Array x(buffers.memory(x_, "array"), "array");
  const float* numbers = x.contiguous<float>(x.shape(), x.format() == 'f');
  const std::int64_t n = product(x.shape(), x.rank());
  nb::gil_scoped_release release;
  return sweep(numbers, n, piece, threads);
}

// Runs the core for another extension, which gets an error as text.
template <class Call>
void report(Failure& failure, const Call& call) noexcept {
  const auto note = [&](auto kind, const std::exception& error) {
    failure.kind = kind;
    std::snprintf(failure.why, sizeof failure.why, "%s", error.what());
  };
  try {
    call();
  } catch (const std::invalid_argument& wrong) {
    note(Failure::argument, wrong);
  } catch (const std::exception& error) {
    note(Failure::other, error);
  }
}

constexpr SharedCore shared_core = {
    [](const Problem& problem, const Result& result, int threads, Interrupt& interrupt, Failure& failure) {
      report(failure, [&] { forward(problem, result, threads, interrupt); });
    },
    [](const Problem& problem, const Gradients& gradients, int threads, Interrupt& interrupt, Failure& failure) {
      report(failure, [&] { backward(problem, gradients, threads, interrupt); });
    },
    default_threads};

}  // namespace

NB_MODULE(_core, m) {
  remember_main_thread();
  register_numpy();
  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const std::invalid_argument& wrong) {  // dispatch.h: an ISA that is not there
      PyErr_SetString(nb::module_::import_("levelhead.errors").attr("LevelheadValueError").ptr(), wrong.what());
    }
  });
  // The keywords of both are in _core.pyi.
  m.def("forward", forward_arrays, nb::arg("q"), nb::arg("k"), nb::arg("v").none(), nb::arg("keywords"));
  m.def("backward", backward_arrays, nb::arg("dout"), nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("out"),
        nb::arg("logsumexp"), nb::arg("keywords"));
  m.def("fast_attention", fast_attention, nb::arg("q").none(), nb::arg("k").none(), nb::arg("v").none(),
        nb::arg("scale").none(), nb::arg("causal").none(), nb::arg("threads").none(), nb::arg("as_query") = false);
  m.def("register_torch", register_torch, nb::arg("torch"));
  m.def("finish", finish_arrays, nb::arg("acc"), nb::arg("sums"), nb::arg("sinks").none(), nb::arg("out"));
  m.def("merge", [](nb::handle sums_a, nb::handle counts_a, nb::handle acc_a, nb::handle sums_b, nb::handle counts_b,
                    nb::handle acc_b, std::int64_t shift, nb::handle sums, nb::handle counts, nb::handle acc) {
    Buffers buffers;
    StateArrays a(buffers, sums_a, counts_a, acc_a), b(buffers, sums_b, counts_b, acc_b), to(buffers, sums, counts, acc, true);
    merge_arrays(a, b, shift, to);
  }, nb::arg("sums_a"), nb::arg("counts_a"), nb::arg("acc_a").none(), nb::arg("sums_b"), nb::arg("counts_b"),
     nb::arg("acc_b").none(), nb::arg("shift"), nb::arg("sums"), nb::arg("counts"), nb::arg("acc").none());
  m.def("exponential", exponential_array, nb::arg("x"), nb::arg("out"));
  m.def("burn", burn_threads, nb::arg("rounds"), nb::arg("threads"));
  m.def("sweep", sweep_array, nb::arg("array"), nb::arg("piece"), nb::arg("threads"));
  m.attr("_shared") = nb::capsule(&shared_core, shared_core_name);
  m.def("default_threads", default_threads);
  m.def("set_isa", [](const std::string& name) {
    const std::string previous = current_isa();
    choose_isa(name);
    return previous;
  }, nb::arg("name"));
  m.def("info", [] {
    nb::dict facts;
    facts["isa"] = current_isa();
    facts["available"] = available_isas();
    facts["built"] = built_isas();
    facts["threads"] = default_threads();
    return facts;
  });
}
