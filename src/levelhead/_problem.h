// From named arrays and options to the core's Problem, whoever brings them: Python (_arrays.h) or XLA (_jax_ffi.cpp).
// Checks only what memory safety needs. Knows neither.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "attention.h"
#include "state.h"

namespace levelhead {

// The stride of `count` dimensions seen as one, the last one fastest; none if no single stride exists.
template <class Int>
std::optional<std::int64_t> joint_stride(const Int* shape, const Int* strides, int count) {
  std::int64_t stride = 0, extent = 0, total = 1;
  bool started = false, uniform = true;
  for (int axis = count - 1; axis >= 0; --axis) {
    total *= shape[axis];
    if (shape[axis] == 1) continue;
    if (!started) stride = strides[axis];
    else uniform = uniform && strides[axis] == extent;
    started = true;
    extent = strides[axis] * shape[axis];
  }
  if (uniform || total <= 1) return stride;
  return std::nullopt;
}

namespace {

using Shape = std::vector<std::int64_t>;
using Runs = std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>>;

inline void require(bool holds, const std::string& what) {
  if (!holds) throw std::invalid_argument(what);
}

inline std::int64_t product(const Shape& shape, std::size_t count) {
  std::int64_t total = 1;
  for (std::size_t i = 0; i < count; ++i) total *= shape[i];
  return total;
}

inline Shape extended(Shape shape, std::int64_t last) {
  shape.push_back(last);
  return shape;
}

// An array's memory: what numbers it holds by the letter of Python's buffer protocol (H: the bits of bfloat16), and
// strides in bytes.
struct Memory {
  void* data;
  char format;
  Shape shape, strides;

  std::int64_t item_bytes() const {
    return format == '?' ? 1 : format == 'e' || format == 'H' ? 2 : format == 'f' || format == 'i' ? 4 : 8;
  }
  bool is_contiguous() const {
    std::int64_t stride = item_bytes();
    bool dense = true, empty = false;
    for (std::size_t axis = shape.size(); axis-- > 0;) {
      dense = dense && (shape[axis] == 1 || strides[axis] == stride);
      empty = empty || shape[axis] == 0;
      stride *= shape[axis];
    }
    return dense || empty;
  }
};

// A borrowed array, and the offsets of its batch rows.
class Array {
 public:
  Array(Memory memory, const char* name) : memory_(std::move(memory)), name_(name) {}
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  int rank() const { return static_cast<int>(memory_.shape.size()); }
  std::int64_t size(int axis) const { return memory_.shape[axis < 0 ? rank() + axis : axis]; }
  const Shape& shape() const { return memory_.shape; }
  char format() const { return memory_.format; }
  DType dtype() const {
    switch (format()) {
      case 'f': return DType::f32;
      case 'd': return DType::f64;
      case 'e': return DType::f16;
      case 'H': return DType::bf16;
      case '?': return DType::boolean;
      default: throw std::invalid_argument(std::string(name_) + ": unsupported type " + format());
    }
  }
  bool is_integers() const { return format() == 'l' || format() == 'q'; }

  // As (B, heads, rows, columns); an array of rank 2 is one head.
  template <class Byte>
  View<Byte> tensor() {
    require(rank() >= 2, std::string(name_) + ": expected rank 2 or more");
    View<Byte> result;
    result.data = static_cast<Byte*>(memory_.data);
    result.dtype = dtype();
    result.row_stride = memory_.strides[rank() - 2];
    result.column_stride = memory_.strides[rank() - 1];
    if (rank() >= 3) result.head_stride = memory_.strides[rank() - 3];
    result.batch_stride = batch_stride();
    if (!offsets_.empty()) result.batch_offsets = offsets_.data();
    return result;
  }

  // The array's memory, when it is C-contiguous with just this shape and format.
  template <class Item>
  Item* contiguous(const Shape& expected, bool fitting_format) {
    require(fitting_format && shape() == expected && memory_.is_contiguous(),
            std::string(name_) + ": not a C-contiguous array of the agreed shape and type");
    return static_cast<Item*>(memory_.data);
  }

 private:
  // One stride for all leading dimensions if there is one; else fills the table of offsets.
  std::int64_t batch_stride() {
    const int leading = std::max(rank() - 3, 0);
    if (const auto stride = joint_stride(memory_.shape.data(), memory_.strides.data(), leading)) return *stride;
    const std::int64_t total = product(shape(), leading);
    offsets_.reserve(total);
    for (std::int64_t b = 0; b < total; ++b) {
      std::int64_t rest = b, offset = 0;
      for (int axis = leading - 1; axis >= 0; --axis) {
        offset += rest % memory_.shape[axis] * memory_.strides[axis];
        rest /= memory_.shape[axis];
      }
      offsets_.push_back(offset);
    }
    return 0;
  }

  Memory memory_;
  const char* name_;
  std::vector<std::int64_t> offsets_;
};

// An argument that may be absent; the array lives as long as this does.
class MaybeArray {
 public:
  MaybeArray(std::optional<Memory> memory, const char* name) {
    if (memory) array_.emplace(std::move(*memory), name);
  }
  explicit operator bool() const { return array_.has_value(); }
  Array* operator->() { return &*array_; }
  Array& operator*() { return *array_; }

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

// Where a call's options come from, by their names in Python.
class Arguments {
 public:
  virtual std::optional<Memory> array(const char* name) = 0;
  virtual bool flag(const char* name) = 0;
  virtual double number(const char* name) = 0;                                  // absent: 0
  virtual std::int64_t integer(const char* name, std::int64_t otherwise) = 0;
  virtual std::uint64_t seed() = 0;                                             // absent: 0
  virtual std::optional<Runs> runs(const char* name) = 0;

 protected:
  ~Arguments() = default;
};

inline std::vector<Run> runs_from(const std::optional<Runs>& given, std::int64_t tokens) {
  std::vector<Run> runs;
  if (!given) return {{0, tokens, 1}};
  std::int64_t total = 0;
  for (const auto& [start, length, stride] : *given) {
    require(length >= 0, "runs: a length is negative");
    runs.push_back({start, length, stride});
    total += length;
  }
  require(total == tokens, "runs: the lengths do not add up to the number of tokens");
  return runs;
}

// A problem, and the arrays it points into.
class Given {
 public:
  Given(Memory q_, Memory k_, std::optional<Memory> v_, Arguments& options)
      : q(std::move(q_), "q"),
        k(std::move(k_), "k"),
        v(std::move(v_), "v"),
        mask(options.array("mask"), "mask"),
        scale_(options.array("scale"), "scale"),
        additive_(options.array("additive"), "additive"),
        alibi_(options.array("alibi"), "alibi"),
        key_lengths_(options.array("key_lengths"), "key_lengths"),
        query_lengths_(options.array("query_lengths"), "query_lengths"),
        query_segments_(options.array("query_segments"), "query_segments"),
        key_segments_(options.array("key_segments"), "key_segments"),
        query_start_(options.array("query_start"), "query_start") {
    measure();
    place(options);
    score(options);
  }
  Given(const Given&) = delete;
  Given& operator=(const Given&) = delete;

  // Whether an array has q's leading sizes, as many rows and `columns` columns.
  bool fits_rows(const Array& x, std::int64_t columns) const {
    if (x.rank() != q.rank() || x.size(-1) != columns) return false;
    for (int axis = 0; axis < q.rank() - 1; ++axis)
      if (x.size(axis) != q.size(axis)) return false;
    return true;
  }
  char real() const { return wide ? 'd' : 'f'; }  // the compute type

  Array q, k;
  MaybeArray v, mask;
  Problem problem;
  Shape rows;  // of q: all but the last dimension
  bool wide;   // computes in double

 private:
  void measure() {
    problem.q = q.tensor<const char>();
    problem.k = k.tensor<const char>();
    if (v) problem.v = v->tensor<const char>();
    const int rank = q.rank();
    rows = q.shape();
    rows.pop_back();
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
    wide = problem.q.dtype == DType::f64;
    require((problem.k.dtype == DType::f64) == wide && (!v || (problem.v.dtype == DType::f64) == wide), "dtypes differ");
  }

  void place(Arguments& options) {
    query_runs_ = runs_from(options.runs("query_runs"), problem.T);
    key_runs_ = runs_from(options.runs("key_runs"), problem.S);
    problem.scoring.queries = {query_runs_.data(), static_cast<std::int64_t>(query_runs_.size()),
                               query_start_.integers({problem.B})};
    problem.scoring.keys = {key_runs_.data(), static_cast<std::int64_t>(key_runs_.size()), nullptr};
  }

  void score(Arguments& options) {
    Scoring& scoring = problem.scoring;
    scoring.scale = scale_.doubles({problem.H});
    require(scoring.scale, "scale is missing");
    scoring.additive = additive_.contiguous<void>({problem.D}, !additive_ || additive_->format() == real());
    scoring.cosine = options.flag("cosine");
    scoring.log_n = options.flag("log_n");
    scoring.causal = options.flag("causal");
    scoring.left = std::min(options.integer("left", unlimited), unlimited);
    scoring.right = std::min(options.integer("right", unlimited), unlimited);
    scoring.softcap = options.number("softcap");
    scoring.alibi = alibi_.doubles({problem.H});
    if (mask) {
      require(fits_rows(*mask, problem.S), "mask does not fit");
      scoring.mask = mask->tensor<const char>();
    }
    scoring.key_lengths = key_lengths_.integers({problem.B});
    scoring.query_lengths = query_lengths_.integers({problem.B});
    scoring.query_segments = query_segments_.integers({problem.B, problem.T});
    scoring.key_segments = key_segments_.integers({problem.B, problem.S});
    require(!scoring.query_segments == !scoring.key_segments, "segments come in pairs");
    scoring.dropout = options.number("dropout");
    scoring.seed = options.seed();
    scoring.first_head = options.integer("first_head", 0);
  }

  MaybeArray scale_, additive_, alibi_, key_lengths_, query_lengths_, query_segments_, key_segments_, query_start_;
  std::vector<Run> query_runs_, key_runs_;
};

// Which of a call's results are wanted, and where they go. The arrays live as long as this does.
class Results {
 public:
  explicit Results(Arguments& to)
      : out(to.array("out"), "out"),
        logsumexp(to.array("logsumexp"), "logsumexp"),
        acc(to.array("acc"), "acc"),
        sums(to.array("sums"), "sums"),
        counts(to.array("counts"), "counts"),
        sinks(to.array("sinks"), "sinks"),
        first_keys(to.array("first_keys"), "first_keys") {}

  Result of(const Given& given) {
    const Problem& problem = given.problem;
    const char real = given.real();
    Result result;
    if (out) {
      require(given.v && given.fits_rows(*out, problem.E), "out does not fit");
      result.out = out->tensor<char>();
    }
    result.sinks = sinks.doubles({problem.H});
    require(!sums == !counts, "sums and counts come together");
    result.logsumexp = logsumexp.contiguous<void>(given.rows, !logsumexp || logsumexp->format() == real);
    result.acc = acc.contiguous<void>(extended(given.rows, problem.E), !acc || acc->format() == real);
    result.sums = sums.contiguous<void>(extended(given.rows, row_sums), !sums || sums->format() == real);
    result.counts = counts.integers(extended(given.rows, row_counts));
    result.first_keys = first_keys.integers({problem.B, problem.T});
    return result;
  }

 private:
  MaybeArray out, logsumexp, acc, sums, counts, sinks, first_keys;
};

// What a backward pass reads beside the problem, and which gradients are wanted. The arrays live as long as this does.
class Slopes {
 public:
  Slopes(Memory dout_, Memory out_, Memory logsumexp_, Arguments& from)
      : dout(std::move(dout_), "dout"),
        out(std::move(out_), "out"),
        logsumexp(std::move(logsumexp_), "logsumexp"),
        dlogsumexp(from.array("dlogsumexp"), "dlogsumexp"),
        sums(from.array("sums"), "sums"),
        sinks(from.array("sinks"), "sinks"),
        dq(from.array("dq"), "dq"),
        dk(from.array("dk"), "dk"),
        dv(from.array("dv"), "dv"),
        dmask(from.array("dmask"), "dmask"),
        dsinks(from.array("dsinks"), "dsinks"),
        dscale(from.array("dscale"), "dscale"),
        dadditive(from.array("dadditive"), "dadditive") {}

  Gradients of(Given& given) {
    const Problem& problem = given.problem;
    const char real = given.real();
    require(given.v && given.fits_rows(out, problem.E) && given.fits_rows(dout, problem.E), "out and dout do not fit");
    Gradients gradients;
    gradients.out = out.tensor<const char>();
    gradients.dout = dout.tensor<const char>();
    gradients.logsumexp = logsumexp.contiguous<void>(given.rows, logsumexp.format() == real);
    gradients.dlogsumexp = dlogsumexp.contiguous<void>(given.rows, !dlogsumexp || dlogsumexp->format() == real);
    gradients.sums = sums.contiguous<void>(extended(given.rows, row_sums), !sums || sums->format() == real);
    gradients.sinks = sinks.doubles({problem.H});
    gradients.dq = wanted(dq, dq && dq->shape() == given.q.shape());
    gradients.dk = wanted(dk, dk && dk->shape() == given.k.shape());
    gradients.dv = wanted(dv, dv && dv->shape() == given.v->shape());
    gradients.dmask = wanted(dmask, dmask && given.mask && given.fits_rows(*dmask, problem.S) && dmask->format() == real);
    gradients.dsinks = const_cast<double*>(dsinks.doubles({problem.H}));
    gradients.dscale = const_cast<double*>(dscale.doubles({problem.H}));
    gradients.dadditive = const_cast<double*>(dadditive.doubles({problem.D}));
    require(!gradients.dadditive || problem.scoring.additive, "there are no weights to differentiate by");
    require(!gradients.dsinks || gradients.sinks, "there are no sinks to differentiate by");
    return gradients;
  }

 private:
  // An array that a gradient is written to, or none: it is not wanted.
  static MutableTensor wanted(MaybeArray& array, bool fits) {
    require(!array || fits, "a gradient does not fit what it is of");
    return array ? array->tensor<char>() : MutableTensor{};
  }

  Array dout, out, logsumexp;
  MaybeArray dlogsumexp, sums, sinks, dq, dk, dv, dmask, dsinks, dscale, dadditive;
};

}  // namespace
}  // namespace levelhead
