// Converts Python's arrays to the core's views, and the arguments of forward and backward to a Problem.
// Checks only what memory safety needs.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "_binding.h"
#include "attention.h"

namespace nb = nanobind;

namespace levelhead {
namespace {

using Shape = std::vector<std::int64_t>;

std::int64_t product(const Shape& shape, std::size_t count) {
  std::int64_t total = 1;
  for (std::size_t i = 0; i < count; ++i) total *= shape[i];
  return total;
}

// A borrowed array, and the offsets of its batch rows.
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

// The options by their names in Python. Each is read once; a name that was never read is an error.
class Options {
 public:
  explicit Options(const nb::kwargs& given) : given_(given) {}

  nb::handle object(const char* name) {
    PyObject* found = PyDict_GetItemString(given_.ptr(), name);
    if (!found) return Py_None;
    ++read_;
    return found;
  }
  template <class Value>
  Value get(const char* name, Value otherwise) {
    const nb::handle found = object(name);
    return found.is_none() ? otherwise : nb::cast<Value>(found);
  }
  void end() const {
    if (read_ != static_cast<std::size_t>(PyDict_Size(given_.ptr()))) throw nb::type_error("an option that the core does not know");
  }

 private:
  const nb::kwargs& given_;
  std::size_t read_ = 0;
};

// A problem, and the arrays it points into.
class Given {
 public:
  Given(nb::handle q_, nb::handle k_, nb::handle v_, Options& options)
      : q(q_, "q"),
        k(k_, "k"),
        v(v_, "v"),
        mask(options.object("mask"), "mask"),
        scale_(options.object("scale"), "scale"),
        additive_(options.object("additive"), "additive"),
        alibi_(options.object("alibi"), "alibi"),
        key_lengths_(options.object("key_lengths"), "key_lengths"),
        query_lengths_(options.object("query_lengths"), "query_lengths"),
        query_segments_(options.object("query_segments"), "query_segments"),
        key_segments_(options.object("key_segments"), "key_segments"),
        query_start_(options.object("query_start"), "query_start") {
    measure();
    place(options);
    score(options);
    options.end();
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

  void place(Options& options) {
    query_runs_ = runs_from(options.get<Runs>("query_runs", {}), problem.T);
    key_runs_ = runs_from(options.get<Runs>("key_runs", {}), problem.S);
    problem.scoring.queries = {query_runs_.data(), static_cast<std::int64_t>(query_runs_.size()),
                               query_start_.integers({problem.B})};
    problem.scoring.keys = {key_runs_.data(), static_cast<std::int64_t>(key_runs_.size()), nullptr};
  }

  void score(Options& options) {
    Scoring& scoring = problem.scoring;
    scoring.scale = scale_.doubles({problem.H});
    require(scoring.scale, "scale is missing");
    scoring.additive = additive_.contiguous<void>({problem.D}, !additive_ || additive_->format() == (wide ? 'd' : 'f'));
    scoring.cosine = options.get("cosine", false);
    scoring.log_n = options.get("log_n", false);
    scoring.causal = options.get("causal", false);
    scoring.left = std::min(options.get("left", unlimited), unlimited);
    scoring.right = std::min(options.get("right", unlimited), unlimited);
    scoring.softcap = options.get("softcap", 0.0);
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
    scoring.dropout = options.get("dropout", 0.0);
    scoring.seed = options.get("seed", std::uint64_t(0));
    scoring.first_head = options.get("first_head", std::int64_t(0));
  }

  MaybeArray scale_, additive_, alibi_, key_lengths_, query_lengths_, query_segments_, key_segments_, query_start_;
  std::vector<Run> query_runs_, key_runs_;
};

}  // namespace
}  // namespace levelhead
