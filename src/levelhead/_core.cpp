// The binding: the functions of the Python module _core, on Python arrays. No arithmetic and no policy. The caller has
// checked the arguments (scoring.py, arrays.py); this file checks again only what memory safety needs. Plain calls have a
// function of their own (_fast_call.cpp); all others use forward and backward here.
//
// Arrays use the buffer protocol: any strides in bytes, read-only memory, no copies. bfloat16 has no buffer format and is
// passed as its bits in uint16.
#include <nanobind/nanobind.h>

#include <exception>
#include <stdexcept>
#include <string>

#include "_arrays.h"
#include "_binding.h"
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

void forward_arrays(nb::handle q, nb::handle k, nb::handle v, const nb::kwargs& keywords) {
  Options options(keywords);
  const auto written = [&](const char* name) { return MaybeArray(options.object(name), name, true); };
  MaybeArray out = written("out"), logsumexp = written("logsumexp"), acc = written("acc"), sums = written("sums"),
             counts = written("counts"), sinks(options.object("sinks"), "sinks"), first_keys(options.object("first_keys"), "first_keys");
  const Threads threads(options);
  Given given(q, k, v, options);
  const Problem& problem = given.problem;
  Result result;
  if (out) {
    require(given.v && given.fits_rows(*out, problem.E), "out does not fit");
    result.out = out->tensor<char>();
  }
  result.sinks = sinks.doubles({problem.H});
  const char real = given.wide ? 'd' : 'f';
  require(!sums == !counts, "sums and counts come together");
  result.logsumexp = logsumexp.contiguous<void>(given.rows, !logsumexp || logsumexp->format() == real);
  result.acc = acc.contiguous<void>(extended(given.rows, problem.E), !acc || acc->format() == real);
  result.sums = sums.contiguous<void>(extended(given.rows, row_sums), !sums || sums->format() == real);
  result.counts = counts.integers(extended(given.rows, row_counts));
  result.first_keys = first_keys.integers({problem.B, problem.T});
  run(threads.count, threads.torchs_team,
      [&](Interrupt& interrupt) { return forward(problem, result, threads.count, interrupt); });
}

// An array that a gradient is written to, or none: it is not wanted.
MutableTensor gradient(MaybeArray& array, bool fits) {
  require(!array || fits, "a gradient does not fit what it is of");
  return array ? array->tensor<char>() : MutableTensor{};
}

void backward_arrays(nb::handle dout_, nb::handle q, nb::handle k, nb::handle v, nb::handle out_, nb::handle logsumexp_,
                     const nb::kwargs& keywords) {
  Options options(keywords);
  const auto read = [&](const char* name) { return MaybeArray(options.object(name), name); };
  const auto written = [&](const char* name) { return MaybeArray(options.object(name), name, true); };
  Array dout(dout_, "dout"), out(out_, "out"), logsumexp(logsumexp_, "logsumexp");
  MaybeArray dlogsumexp = read("dlogsumexp"), sums = read("sums"), sinks = read("sinks"), dq = written("dq"), dk = written("dk"), dv = written("dv"),
             dmask = written("dmask"), dsinks = written("dsinks"), dscale = written("dscale"), dadditive = written("dadditive");
  const Threads threads(options);
  Given given(q, k, v, options);
  const Problem& problem = given.problem;
  const char real = given.wide ? 'd' : 'f';
  require(given.v && given.fits_rows(out, problem.E) && given.fits_rows(dout, problem.E), "out and dout do not fit");
  Gradients gradients;
  gradients.out = out.tensor<const char>();
  gradients.dout = dout.tensor<const char>();
  gradients.logsumexp = logsumexp.contiguous<void>(given.rows, logsumexp.format() == real);
  gradients.dlogsumexp = dlogsumexp.contiguous<void>(given.rows, !dlogsumexp || dlogsumexp->format() == real);
  gradients.sums = sums.contiguous<void>(extended(given.rows, row_sums), !sums || sums->format() == real);
  gradients.sinks = sinks.doubles({problem.H});
  gradients.dq = gradient(dq, dq && dq->shape() == given.q.shape());
  gradients.dk = gradient(dk, dk && dk->shape() == given.k.shape());
  gradients.dv = gradient(dv, dv && dv->shape() == given.v->shape());
  gradients.dmask = gradient(dmask, dmask && given.mask && given.fits_rows(*dmask, problem.S) && dmask->format() == real);
  gradients.dsinks = const_cast<double*>(dsinks.doubles({problem.H}));
  gradients.dscale = const_cast<double*>(dscale.doubles({problem.H}));
  gradients.dadditive = const_cast<double*>(dadditive.doubles({problem.D}));
  require(!gradients.dadditive || problem.scoring.additive, "there are no weights to differentiate by");
  require(!gradients.dsinks || gradients.sinks, "there are no sinks to differentiate by");
  run(threads.count, threads.torchs_team,
      [&](Interrupt& interrupt) { return backward(problem, gradients, threads.count, interrupt); });
}

void finish_arrays(nb::handle acc_, nb::handle sums_, nb::handle sinks_, nb::handle out_) {
  Array acc(acc_, "acc"), sums(sums_, "sums"), out(out_, "out", true);
  MaybeArray sinks(sinks_, "sinks");
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
  StateArrays(nb::handle sums_, nb::handle counts_, nb::handle acc_, bool writable = false)
      : sums(sums_, "sums", writable), counts(counts_, "counts", writable), acc(acc_, "acc", writable) {}

  template <class Real>
  StateRows<Real> rows(const Shape& shape, std::int64_t E, char format) {
    return {sums.contiguous<Real>(extended(shape, row_sums), sums.format() == format),
            counts.contiguous<std::int64_t>(extended(shape, row_counts), counts.is_integers()),
            acc.contiguous<Real>(extended(shape, E), !acc || acc->format() == format)};
  }

  Array sums, counts;
  MaybeArray acc;
};

void merge_arrays(StateArrays a, StateArrays b, std::int64_t shift, StateArrays to) {
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
  Array x(x_, "x"), y(y_, "out", true);
  require(x.format() == y.format(), "x and out differ in type");
  exponential(x.dtype(), x.contiguous<void>(x.shape(), true), y.contiguous<void>(x.shape(), true), product(x.shape(), x.rank()));
}

std::int64_t burn_threads(std::int64_t rounds, int threads) {
  nb::gil_scoped_release release;
  return burn(rounds, threads);
}

double sweep_array(nb::handle x_, std::int64_t piece, int threads) {
  Array x(x_, "array");
  const float* numbers = x.contiguous<float>(x.shape(), x.format() == 'f');
  const std::int64_t n = product(x.shape(), x.rank());
  nb::gil_scoped_release release;
  return sweep(numbers, n, piece, threads);
}

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
    merge_arrays({sums_a, counts_a, acc_a}, {sums_b, counts_b, acc_b}, shift, {sums, counts, acc, true});
  }, nb::arg("sums_a"), nb::arg("counts_a"), nb::arg("acc_a").none(), nb::arg("sums_b"), nb::arg("counts_b"),
     nb::arg("acc_b").none(), nb::arg("shift"), nb::arg("sums"), nb::arg("counts"), nb::arg("acc").none());
  m.def("exponential", exponential_array, nb::arg("x"), nb::arg("out"));
  m.def("burn", burn_threads, nb::arg("rounds"), nb::arg("threads"));
  m.def("sweep", sweep_array, nb::arg("array"), nb::arg("piece"), nb::arg("threads"));
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
