// The binding: Python arrays in, core calls out. No arithmetic and no policy; arguments arrive checked (scoring.py,
// arrays.py), and what is checked again here is only what memory safety needs. The plain call has a door of its own
// (_door.cpp); everything else comes this way.
//
// Arrays come through the buffer protocol: any strides in bytes, read-only memory, no copies. bfloat16 has no
// buffer format and travels as its bits in uint16.
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

void forward_arrays(nb::handle q, nb::handle k, nb::handle v, nb::handle out_, nb::handle logsumexp_, nb::handle acc_,
                    nb::handle sums_, nb::handle counts_, nb::handle sinks_, int threads, bool torchs_team,
                    const nb::kwargs& options) {
  Given given(q, k, v, Options(options));
  MaybeArray out(out_, "out", true), logsumexp(logsumexp_, "logsumexp", true), acc(acc_, "acc", true),
      sums(sums_, "sums", true), counts(counts_, "counts", true), sinks(sinks_, "sinks");
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
  run(threads, torchs_team, [&](Interrupt& interrupt) { return forward(problem, result, threads, interrupt); });
}

// An array that a gradient is written to, or none: it is not wanted.
MutableTensor gradient(MaybeArray& array, bool fits) {
  require(!array || fits, "a gradient does not fit what it is of");
  return array ? array->tensor<char>() : MutableTensor{};
}

void backward_arrays(nb::handle dout_, nb::handle q, nb::handle k, nb::handle v, nb::handle out_, nb::handle logsumexp_,
                     nb::handle dlogsumexp_, nb::handle sinks_, nb::handle dq_, nb::handle dk_, nb::handle dv_,
                     nb::handle dmask_, nb::handle dsinks_, nb::handle dscale_, nb::handle dadditive_, int threads,
                     bool torchs_team, const nb::kwargs& options) {
  Given given(q, k, v, Options(options));
  Array dout(dout_, "dout"), out(out_, "out"), logsumexp(logsumexp_, "logsumexp");
  MaybeArray dlogsumexp(dlogsumexp_, "dlogsumexp"), sinks(sinks_, "sinks"), dq(dq_, "dq", true), dk(dk_, "dk", true),
      dv(dv_, "dv", true), dmask(dmask_, "dmask", true), dsinks(dsinks_, "dsinks", true), dscale(dscale_, "dscale", true),
      dadditive(dadditive_, "dadditive", true);
  const Problem& problem = given.problem;
  const char real = given.wide ? 'd' : 'f';
  require(given.v && given.fits_rows(out, problem.E) && given.fits_rows(dout, problem.E), "out and dout do not fit");
  Gradients gradients;
  gradients.out = out.tensor<const char>();
  gradients.dout = dout.tensor<const char>();
  gradients.logsumexp = logsumexp.contiguous<void>(given.rows, logsumexp.format() == real);
  gradients.dlogsumexp = dlogsumexp.contiguous<void>(given.rows, !dlogsumexp || dlogsumexp->format() == real);
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
  run(threads, torchs_team, [&](Interrupt& interrupt) { return backward(problem, gradients, threads, interrupt); });
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
  finish(B, H, T, E, acc.dtype(), values, states, extra, target);
}

// Row by row: a's keys, then b's, which begin `shift` positions later.
template <class Real>
void merge_rows(const Real* sums_a, const std::int64_t* counts_a, const Real* acc_a, const Real* sums_b,
                const std::int64_t* counts_b, const Real* acc_b, std::int64_t shift, std::int64_t rows, std::int64_t E,
                Real* sums, std::int64_t* counts, Real* acc) {
  for (std::int64_t i = 0; i < rows; ++i) {
    Row<Real> a = load_row(sums_a + i * row_sums, counts_a + i * row_counts);
    Row<Real> b = load_row(sums_b + i * row_sums, counts_b + i * row_counts);
    if (b.argmax != no_key) b.argmax += shift;
    if (shift > 0) b.first = -Row<Real>::infinity;
    const Share<Real> share = merge(a, b);
    settle(a);
    store_row(a, sums + i * row_sums, counts + i * row_counts);
    for (std::int64_t c = i * E; acc && c < (i + 1) * E; ++c)
      acc[c] = (share.a == 0 ? Real(0) : share.a * acc_a[c]) + (share.b == 0 ? Real(0) : share.b * acc_b[c]);
  }
}

void merge_arrays(nb::handle sums_a_, nb::handle counts_a_, nb::handle acc_a_, nb::handle sums_b_, nb::handle counts_b_,
                  nb::handle acc_b_, std::int64_t shift, nb::handle sums_, nb::handle counts_, nb::handle acc_) {
  Array sums_a(sums_a_, "sums_a"), counts_a(counts_a_, "counts_a"), sums_b(sums_b_, "sums_b"),
      counts_b(counts_b_, "counts_b"), sums(sums_, "sums", true), counts(counts_, "counts", true);
  MaybeArray acc_a(acc_a_, "acc_a"), acc_b(acc_b_, "acc_b"), acc(acc_, "acc", true);
  const Shape rows = [&] { Shape s = sums_a.shape(); s.pop_back(); return s; }();
  const Shape states = extended(rows, row_sums), tallies = extended(rows, row_counts);
  const std::int64_t n = product(rows, rows.size()), E = acc ? acc->size(-1) : 0;
  require(!acc == !acc_a && !acc == !acc_b, "either all states have acc or none");
  const auto run = [&](auto zero, char format) {
    using Real = decltype(zero);
    const auto states_of = [&](Array& x) { return x.contiguous<Real>(states, x.format() == format); };
    const auto tallies_of = [&](Array& x) { return x.contiguous<std::int64_t>(tallies, x.is_integers()); };
    const auto values_of = [&](MaybeArray& x) { return x.contiguous<Real>(extended(rows, E), !x || x->format() == format); };
    merge_rows<Real>(states_of(sums_a), tallies_of(counts_a), values_of(acc_a), states_of(sums_b), tallies_of(counts_b),
                     values_of(acc_b), shift, n, E, states_of(sums), tallies_of(counts), values_of(acc));
  };
  if (sums_a.format() == 'd') return run(double(), 'd');
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

double sweep_array(nb::handle x_, int threads) {
  Array x(x_, "array");
  const float* numbers = x.contiguous<float>(x.shape(), x.format() == 'f');
  const std::int64_t n = product(x.shape(), x.rank());
  nb::gil_scoped_release release;
  return sweep(numbers, n, threads);
}

}  // namespace

NB_MODULE(_core, m) {
  remember_main_thread();
  meet_numpy();
  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const std::invalid_argument& wrong) {  // dispatch.h: an ISA that is not there
      PyErr_SetString(nb::module_::import_("levelhead.errors").attr("LevelheadValueError").ptr(), wrong.what());
    }
  });
  const auto none = nb::none();
  m.def("forward", forward_arrays, nb::arg("q"), nb::arg("k"), nb::arg("v").none(), nb::kw_only(), nb::arg("out") = none,
        nb::arg("logsumexp") = none, nb::arg("acc") = none, nb::arg("sums") = none, nb::arg("counts") = none,
        nb::arg("sinks") = none, nb::arg("threads") = 1, nb::arg("torchs_team") = false, nb::arg("options"));
  m.def("backward", backward_arrays, nb::arg("dout"), nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("out"),
        nb::arg("logsumexp"), nb::kw_only(), nb::arg("dlogsumexp") = none, nb::arg("sinks") = none, nb::arg("dq") = none,
        nb::arg("dk") = none, nb::arg("dv") = none, nb::arg("dmask") = none, nb::arg("dsinks") = none,
        nb::arg("dscale") = none, nb::arg("dadditive") = none, nb::arg("threads") = 1, nb::arg("torchs_team") = false, nb::arg("options"));
  m.def("attend", attend, nb::arg("q").none(), nb::arg("k").none(), nb::arg("v").none(), nb::arg("scale").none(),
        nb::arg("causal").none(), nb::arg("threads").none());
  m.def("meet_tensors", meet_tensors, nb::arg("torch"));
  m.def("finish", finish_arrays, nb::arg("acc"), nb::arg("sums"), nb::arg("sinks").none(), nb::arg("out"));
  m.def("merge", merge_arrays, nb::arg("sums_a"), nb::arg("counts_a"), nb::arg("acc_a").none(), nb::arg("sums_b"),
        nb::arg("counts_b"), nb::arg("acc_b").none(), nb::arg("shift"), nb::arg("sums"), nb::arg("counts"),
        nb::arg("acc").none());
  m.def("exponential", exponential_array, nb::arg("x"), nb::arg("out"));
  m.def("burn", burn_threads, nb::arg("rounds"), nb::arg("threads"));
  m.def("sweep", sweep_array, nb::arg("array"), nb::arg("threads"));
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
