// The binding: Python arrays in, core calls out. No arithmetic and no policy; arguments arrive checked (scoring.py,
// arrays.py), and what is checked again here is only what memory safety needs. The plain call has a door of its own
// (_door.cpp); everything else comes this way.
//
// Arrays come through the buffer protocol: any strides in bytes, read-only memory, no copies. bfloat16 has no
// buffer format and travels as its bits in uint16.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "_binding.h"
#include "attention.h"
#include "dispatch.h"
#include "machine.h"
#include "state.h"
#include "threads.h"

namespace nb = nanobind;
using namespace levelhead;

namespace {

using Shape = std::vector<std::int64_t>;

std::int64_t product(const Shape& shape, std::size_t count) {
  std::int64_t total = 1;
  for (std::size_t i = 0; i < count; ++i) total *= shape[i];
  return total;
}

// A borrowed array, and where its batch rows lie.
class Array {
 public:
  Array(nb::handle object, const char* name, bool writable = false) : name_(name) {
    if (PyObject_GetBuffer(object.ptr(), &view_, writable ? PyBUF_RECORDS : PyBUF_RECORDS_RO) != 0) throw nb::python_error();
  }
  ~Array() { PyBuffer_Release(&view_); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  int rank() const { return view_.ndim; }
  std::int64_t size(int axis) const { return view_.shape[axis < 0 ? rank() + axis : axis]; }
  Shape shape() const { return {view_.shape, view_.shape + rank()}; }

  char format() const { return view_.format[std::strspn(view_.format, "@=<")]; }
  DType dtype() const {
    switch (format()) {
      case 'f': return DType::f32;
      case 'd': return DType::f64;
      case 'e': return DType::f16;
      case 'H': return DType::bf16;
      case '?': return DType::boolean;
      default: throw nb::type_error((std::string(name_) + ": unsupported buffer format " + view_.format).c_str());
    }
  }
  bool is_integers() const { return format() == 'l' || format() == 'q'; }

  // As (B, heads, rows, columns); an array of rank 2 is one head.
  template <class Byte>
  View<Byte> tensor() {
    if (rank() < 2) throw nb::value_error((std::string(name_) + ": expected rank 2 or more").c_str());
    View<Byte> result;
    result.data = static_cast<Byte*>(view_.buf);
    result.dtype = dtype();
    result.row_stride = view_.strides[rank() - 2];
    result.column_stride = view_.strides[rank() - 1];
    if (rank() >= 3) result.head_stride = view_.strides[rank() - 3];
    result.batch_stride = batch_stride();
    if (!offsets_.empty()) result.batch_offsets = offsets_.data();
    return result;
  }

  // The array's memory, when it is C-contiguous with just this shape and format.
  template <class Item>
  Item* contiguous(const Shape& expected, bool fitting_format) {
    if (!fitting_format || shape() != expected || !PyBuffer_IsContiguous(&view_, 'C'))
      throw nb::value_error((std::string(name_) + ": not a C-contiguous array of the agreed shape and type").c_str());
    return static_cast<Item*>(view_.buf);
  }

 private:
  // One stride for all leading dimensions if there is one; else fills the table of offsets.
  std::int64_t batch_stride() {
    const int leading = std::max(rank() - 3, 0);
    if (const auto stride = joint_stride(view_.shape, view_.strides, leading)) return *stride;
    const std::int64_t total = product(shape(), leading);
    offsets_.reserve(total);
    for (std::int64_t b = 0; b < total; ++b) {
      std::int64_t rest = b, offset = 0;
      for (int axis = leading - 1; axis >= 0; --axis) {
        offset += rest % view_.shape[axis] * view_.strides[axis];
        rest /= view_.shape[axis];
      }
      offsets_.push_back(offset);
    }
    return 0;
  }

  Py_buffer view_;
  const char* name_;
  std::vector<std::int64_t> offsets_;
};

// An argument that may be None; the array lives as long as this does.
class MaybeArray {
 public:
  MaybeArray(nb::handle object, const char* name, bool writable = false) {
    if (!object.is_none()) array_.emplace(object, name, writable);
  }
  explicit operator bool() const { return array_.has_value(); }
  Array* operator->() { return &*array_; }

  template <class Item>
  Item* contiguous(const Shape& expected, bool fitting_format) {
    return array_ ? array_->contiguous<Item>(expected, fitting_format) : nullptr;
  }
  const double* doubles(const Shape& expected) {
    return array_ ? array_->contiguous<double>(expected, array_->format() == 'd') : nullptr;
  }
  std::int64_t* integers(const Shape& expected) {
    return array_ ? array_->contiguous<std::int64_t>(expected, array_->is_integers()) : nullptr;
  }

 private:
  std::optional<Array> array_;
};

Shape extended(Shape shape, std::int64_t last) {
  shape.push_back(last);
  return shape;
}

std::vector<Run> runs_from(const std::optional<std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>>>& given,
                           std::int64_t tokens) {
  std::vector<Run> runs;
  if (!given) return {{0, tokens, 1}};
  std::int64_t total = 0;
  for (const auto& [start, length, stride] : *given) {
    if (length < 0) throw nb::value_error("runs: a length is negative");
    runs.push_back({start, length, stride});
    total += length;
  }
  if (total != tokens) throw nb::value_error("runs: the lengths do not add up to the number of tokens");
  return runs;
}

void require(bool holds, const char* what) {
  if (!holds) throw nb::value_error(what);
}

using Runs = std::optional<std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>>>;

void forward_arrays(nb::handle q_, nb::handle k_, nb::handle v_, nb::handle out_, nb::handle acc_, nb::handle sums_,
                    nb::handle counts_, nb::handle scale_, bool cosine, bool log_n, bool causal,
                    std::optional<std::int64_t> left, std::optional<std::int64_t> right, nb::handle mask_,
                    std::optional<double> softcap, nb::handle sinks_, nb::handle alibi_, nb::handle key_lengths_,
                    nb::handle query_segments_, nb::handle key_segments_, nb::handle query_start_,
                    const Runs& query_runs_, const Runs& key_runs_, double dropout, std::uint64_t seed, int threads, bool torchs_team) {
  Array q(q_, "q"), k(k_, "k"), scale(scale_, "scale");
  MaybeArray v(v_, "v"), out(out_, "out", true), acc(acc_, "acc", true), sums(sums_, "sums", true),
      counts(counts_, "counts", true), mask(mask_, "mask"), sinks(sinks_, "sinks"), alibi(alibi_, "alibi"),
      key_lengths(key_lengths_, "key_lengths"), query_segments(query_segments_, "query_segments"),
      key_segments(key_segments_, "key_segments"), query_start(query_start_, "query_start");

  Problem problem;
  problem.q = q.tensor<const char>();
  problem.k = k.tensor<const char>();
  if (v) problem.v = v->tensor<const char>();
  const int rank = q.rank();
  const Shape rows = [&] { Shape s = q.shape(); s.pop_back(); return s; }();
  problem.B = product(rows, rank >= 3 ? rank - 3 : 0);
  problem.H = rank >= 3 ? q.size(-3) : 1;
  problem.G = rank >= 3 && k.rank() >= 3 ? k.size(-3) : 1;
  problem.T = q.size(-2);
  problem.S = k.size(-2);
  problem.D = q.size(-1);
  problem.E = v ? v->size(-1) : 0;
  require(k.rank() == rank && k.size(-1) == problem.D && (problem.G > 0 ? problem.H % problem.G == 0 : problem.H == 0),
          "q and k do not fit together");
  require(!v || (v->rank() == rank && v->size(-2) == problem.S && (rank < 3 || v->size(-3) == problem.G)),
          "k and v do not fit together");
  for (int axis = 0; axis < rank - 3; ++axis)
    require(k.size(axis) == q.size(axis) && (!v || v->size(axis) == q.size(axis)), "batch dimensions differ");
  const bool wide = problem.q.dtype == DType::f64;
  require((problem.k.dtype == DType::f64) == wide && (!v || (problem.v.dtype == DType::f64) == wide), "dtypes differ");

  Scoring& scoring = problem.scoring;
  scoring.scale = scale.contiguous<double>({problem.H}, scale.format() == 'd');
  scoring.cosine = cosine;
  scoring.log_n = log_n;
  scoring.causal = causal;
  scoring.left = std::min(left.value_or(unlimited), unlimited);
  scoring.right = std::min(right.value_or(unlimited), unlimited);
  scoring.softcap = softcap.value_or(0);
  scoring.alibi = alibi.doubles({problem.H});
  if (mask) {
    require(mask->rank() == std::max(rank, 2) && mask->size(-1) == problem.S && mask->size(-2) == problem.T, "mask does not fit");
    for (int axis = 0; axis < rank - 2; ++axis) require(mask->size(axis) == q.size(axis), "mask does not fit");
    scoring.mask = mask->tensor<const char>();
  }
  scoring.key_lengths = key_lengths.integers({problem.B});
  scoring.query_segments = query_segments.integers({problem.B, problem.T});
  scoring.key_segments = key_segments.integers({problem.B, problem.S});
  require(!scoring.query_segments == !scoring.key_segments, "segments come in pairs");
  const std::vector<Run> query_runs = runs_from(query_runs_, problem.T), key_runs = runs_from(key_runs_, problem.S);
  scoring.queries = {query_runs.data(), static_cast<std::int64_t>(query_runs.size()), query_start.integers({problem.B})};
  scoring.keys = {key_runs.data(), static_cast<std::int64_t>(key_runs.size()), nullptr};
  scoring.dropout = dropout;
  scoring.seed = seed;

  Result result;
  if (out) {
    require(out->rank() == rank && v, "out does not fit");
    for (int axis = 0; axis < rank - 1; ++axis) require(out->size(axis) == q.size(axis), "out does not fit");
    require(out->size(-1) == problem.E, "out does not fit");
    result.out = out->tensor<char>();
  }
  result.sinks = sinks.doubles({problem.H});
  const char real = wide ? 'd' : 'f';
  require(!sums == !counts, "sums and counts come together");
  result.acc = acc.contiguous<void>(extended(rows, problem.E), !acc || acc->format() == real);
  result.sums = sums.contiguous<void>(extended(rows, row_sums), !sums || sums->format() == real);
  result.counts = counts.integers(extended(rows, row_counts));

  run(problem, result, threads, torchs_team);
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
        nb::arg("acc") = none, nb::arg("sums") = none, nb::arg("counts") = none, nb::arg("scale"),
        nb::arg("cosine") = false, nb::arg("log_n") = false, nb::arg("causal") = false, nb::arg("left") = none,
        nb::arg("right") = none, nb::arg("mask") = none, nb::arg("softcap") = none, nb::arg("sinks") = none,
        nb::arg("alibi") = none, nb::arg("key_lengths") = none, nb::arg("query_segments") = none,
        nb::arg("key_segments") = none, nb::arg("query_start") = none, nb::arg("query_runs") = none,
        nb::arg("key_runs") = none, nb::arg("dropout") = 0.0, nb::arg("seed") = 0, nb::arg("threads") = 1,
        nb::arg("torchs_team") = false);
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
