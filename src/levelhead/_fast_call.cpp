// The fast call: a plain call goes from Python's objects to the core and back without any Python code.
//
// Plain is: three NumPy arrays, or three torch tensors, of one dtype and of shapes that fit, no option but a scale,
// causality and a number of threads, and a result of moderate size. For any other call fast_attention returns None before
// any work, and attention.py computes it or explains what is wrong. Both use the same forward() with the same numbers,
// hence give the same bits. The fast call only saves the microseconds of Python, which are most of the cost of a tiny call.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "_binding.h"
#include "_dlpack.h"
#include "_problem.h"
#include "plan.h"
#include "threads.h"

namespace nb = nanobind;

namespace levelhead {
namespace {

constexpr int most_axes = 8;
constexpr std::int64_t line = 64;  // bytes; torch aligns its own tensors so

// Beyond a megabyte of results the saved microseconds do not matter, and NumPy's large pages do.
constexpr double most_bytes = 1 << 20;
constexpr double most_work = 1e15;  // multiply-adds, hours of work: no product of sizes below it overflows

// About 5 us of one core, most of it the beginning of each head: over before a sleeping thread wakes (tens of us),
// and far below what Python lets a thread wait for the GIL. Such a call keeps the GIL and does not read
// the number of threads from the system or torch.
constexpr double tiny_work = 1 << 16, tiny_heads = 4;

// Memory, dtype and shape of an array of either library; strides in bytes.
struct ArrayInfo {
  char* data;
  DType dtype;
  int rank;
  std::int64_t shape[most_axes], strides[most_axes];

  std::int64_t size(int axis) const { return shape[rank + axis]; }
};

std::int64_t item_bytes(DType dtype) { return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2; }

template <class Int>
bool copy_axes(ArrayInfo& info, int rank, const Int* shape, const Int* strides, std::int64_t unit) {
  if (rank < 2 || rank > most_axes) return false;
  info.rank = rank;
  for (int axis = 0; axis < rank; ++axis) {
    if (shape[axis] == 0) return false;
    info.shape[axis] = shape[axis];
    info.strides[axis] = strides[axis] * unit;
  }
  return true;
}

// Strides in bytes of a new array of `out`'s shape, the last axis fastest.
void set_dense_strides(ArrayInfo& out) {
  std::int64_t stride = item_bytes(out.dtype);
  for (int axis = out.rank - 1; axis >= 0; --axis) {
    out.strides[axis] = stride;
    stride *= out.shape[axis];
  }
}

// The strides that torch's empty_like gives an array whose shape and strides are `out`'s: they stay where they leave no
// gap, else the axes keep their order. Axes of stride 0 have no order, and equal strides put the shorter axis inside.
void close_gaps(ArrayInfo& out) {
  int order[most_axes];  // the innermost axis first
  for (int i = 0; i < out.rank; ++i) order[i] = out.rank - 1 - i;
  for (int i = 1; i < out.rank; ++i) {
    for (int outer = i, inner = i - 1; inner >= 0; --inner) {
      const int a = order[inner], b = order[outer];
      if (out.strides[a] == 0 || out.strides[b] == 0) continue;
      if (out.strides[a] < out.strides[b]) break;
      if (out.strides[a] == out.strides[b] && out.shape[a] <= out.shape[b]) continue;
      std::swap(order[inner], order[outer]);
      outer = inner;
    }
  }
  std::int64_t strides[most_axes], stride = item_bytes(out.dtype);
  bool gaps = false;
  for (int i = 0; i < out.rank; ++i) {
    const int axis = order[i];
    gaps = gaps || (out.shape[axis] != 1 && out.strides[axis] != stride);
    strides[axis] = stride;
    stride *= out.shape[axis];
  }
  if (gaps) std::copy_n(strides, out.rank, out.strides);
}

// ---- NumPy ---------------------------------------------------------------------------------------------------

struct {
  PyTypeObject* array;
  PyObject* empty;
  PyObject* dtypes[3];  // of f32, f64, f16
} numpy;

class Buffer {
 public:
  Buffer() { view_.obj = nullptr; }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  // A format of more than one letter is another byte order, or a dtype that is no float.
  bool inspect(PyObject* array, ArrayInfo& info) {
    if (PyObject_GetBuffer(array, &view_, PyBUF_RECORDS_RO) != 0) {
      PyErr_Clear();
      return false;
    }
    if (view_.format[0] == '\0' || view_.format[1] != '\0') return false;
    switch (view_.format[0]) {
      case 'f': info.dtype = DType::f32; break;
      case 'd': info.dtype = DType::f64; break;
      case 'e': info.dtype = DType::f16; break;
      default: return false;
    }
    info.data = static_cast<char*>(view_.buf);
    return copy_axes(info, view_.ndim, view_.shape, view_.strides, 1);
  }

 private:
  Py_buffer view_;
};

class Arrays {
 public:
  static constexpr bool has_team = false;

  bool inspect(int which, PyObject* array, ArrayInfo& info) { return buffers_[which].inspect(array, info); }

  nb::object fresh(ArrayInfo& out) {
    nb::object shape = nb::steal(PyTuple_New(out.rank));
    for (int axis = 0; shape.is_valid() && axis < out.rank; ++axis) {
      PyObject* size = PyLong_FromLongLong(out.shape[axis]);
      if (!size || PyTuple_SetItem(shape.ptr(), axis, size) != 0) shape.reset();
    }
    if (!shape.is_valid()) throw nb::python_error();
    PyObject* arguments[] = {shape.ptr(), numpy.dtypes[static_cast<int>(out.dtype)]};
    nb::object array = nb::steal(PyObject_Vectorcall(numpy.empty, arguments, 2, nullptr));
    if (!array.is_valid()) throw nb::python_error();
    if (!buffers_[3].inspect(array.ptr(), out)) throw std::bad_alloc();  // the only reason left
    return array;
  }
  int threads() const { return default_threads(); }

 private:
  Buffer buffers_[4];
};

// ---- torch ---------------------------------------------------------------------------------------------------

struct {
  std::atomic<PyTypeObject*> tensor;  // null: not registered; set last
  const dlpack::ExchangeApi* api;
  PyObject *module, *is_grad_enabled, *requires_grad, *is_neg;
  PyObject* is_tracing;  // null: this torch cannot trace
  PyObject *forward_ad, *current_level;
} torch;

bool is_false(PyObject* answer) {
  if (!answer) PyErr_Clear();
  const bool no = answer == Py_False;
  Py_XDECREF(answer);
  return no;
}

// Whether the call is inside torch's forward-mode differentiation.
bool in_forward_mode() {
  PyObject* const level = PyObject_GetAttr(torch.forward_ad, torch.current_level);
  const bool outside = level && PyLong_Check(level) && PyLong_AsLong(level) < 0;
  if (!level) PyErr_Clear();
  Py_XDECREF(level);
  return !outside;
}

class Tensors {
 public:
  static constexpr bool has_team = true;

  // Left to attention.py: a tensor that autograd records, one whose memory holds the opposite sign, and every tensor while
  // torch.jit.trace records (it warns about tensors that leave torch) or where tensors may be dual.
  bool inspect(int, PyObject* tensor, ArrayInfo& info) {
    if (!untraced_ || forward_) return false;
    if (!unfollowed_ && !is_false(PyObject_GetAttr(tensor, torch.requires_grad))) return false;
    if (!is_false(PyObject_VectorcallMethod(torch.is_neg, &tensor, 1, nullptr))) return false;
    dlpack::Tensor view;
    if (torch.api->borrow(tensor, &view) != 0) {  // no plain memory: sparse, wrapped by vmap, ...
      PyErr_Clear();
      return false;
    }
    const auto [code, bits, lanes] = view.dtype;
    if (view.device.type != dlpack::cpu || !view.data || lanes != 1) return false;
    if (code == dlpack::ieee_float && bits == 32) info.dtype = DType::f32;
    else if (code == dlpack::ieee_float && bits == 64) info.dtype = DType::f64;
    else if (code == dlpack::ieee_float && bits == 16) info.dtype = DType::f16;
    else if (code == dlpack::brain_float && bits == 16) info.dtype = DType::bf16;
    else return false;
    info.data = static_cast<char*>(view.data) + view.byte_offset;
    return copy_axes(info, view.rank, view.shape, view.strides, item_bytes(info.dtype));
  }

  // Of out's shape and strides. One block of memory holds the numbers and their description; torch frees it with the
  // last tensor that uses it.
  nb::object fresh(ArrayInfo& out) {
    struct Block {
      dlpack::ManagedTensor managed;
      std::int64_t shape[most_axes], strides[most_axes];
    };
    const std::int64_t unit = item_bytes(out.dtype);
    std::int64_t count = 1;
    Block block;
    for (int axis = 0; axis < out.rank; ++axis) {
      block.shape[axis] = out.shape[axis];
      block.strides[axis] = out.strides[axis] / unit;
      count *= out.shape[axis];
    }
    void* const memory = std::malloc(sizeof(Block) + line + count * unit);  // aligned_alloc takes 50 ns more
    if (!memory) throw std::bad_alloc();
    Block* const kept = new (memory) Block(block);
    out.data = reinterpret_cast<char*>(round_up(reinterpret_cast<std::intptr_t>(kept + 1), line));
    const bool brain = out.dtype == DType::bf16;
    const dlpack::DataType dtype{brain ? dlpack::brain_float : dlpack::ieee_float, static_cast<std::uint8_t>(unit * 8), 1};
    kept->managed = {{dlpack::major_version, dlpack::minor_version}, nullptr, [](dlpack::ManagedTensor* self) { std::free(self); },
                     0, {out.data, {dlpack::cpu, 0}, out.rank, dtype, kept->shape, kept->strides, 0}};
    void* tensor = nullptr;
    if (torch.api->import_managed(&kept->managed, &tensor) != 0) throw nb::python_error();
    return nb::steal(static_cast<PyObject*>(tensor));
  }
  int threads() const { return nb::cast<int>(nb::handle(torch.module).attr("get_num_threads")()); }

 private:
  const bool untraced_ = !torch.is_tracing || is_false(PyObject_CallNoArgs(torch.is_tracing));
  const bool forward_ = in_forward_mode();
  const bool unfollowed_ = is_false(PyObject_CallNoArgs(torch.is_grad_enabled));
};

// ---- The call ------------------------------------------------------------------------------------------------

struct Options {
  bool causal;
  std::optional<double> scale;
  std::optional<int> threads;
};

std::optional<Options> read_options(nb::handle scale, nb::handle causal, nb::handle threads) {
  Options options{causal.ptr() == Py_True, {}, {}};
  if (!options.causal && causal.ptr() != Py_False) return {};
  if (PyFloat_CheckExact(scale.ptr())) options.scale = PyFloat_AsDouble(scale.ptr());
  else if (!scale.is_none()) return {};
  if (PyLong_CheckExact(threads.ptr())) {
    int overflow = 0;
    const long wanted = PyLong_AsLongAndOverflow(threads.ptr(), &overflow);
    if (overflow != 0 || wanted < 1) return {};
    options.threads = static_cast<int>(std::min<long>(wanted, max_threads));
  } else if (!threads.is_none()) {
    return {};
  }
  return options;
}

bool fit(const ArrayInfo& q, const ArrayInfo& k, const ArrayInfo& v) {
  if (k.dtype != q.dtype || v.dtype != q.dtype || k.rank != q.rank || v.rank != q.rank) return false;
  for (int axis = 0; axis < q.rank - 3; ++axis)
    if (k.shape[axis] != q.shape[axis] || v.shape[axis] != q.shape[axis]) return false;
  if (q.rank > 2 && (q.size(-3) % k.size(-3) != 0 || v.size(-3) != k.size(-3))) return false;
  return k.size(-1) == q.size(-1) && v.size(-2) == k.size(-2);
}

// False when the leading dimensions need a table of offsets.
template <class Byte>
bool place(const ArrayInfo& info, View<Byte>& view) {
  const int leading = std::max(info.rank - 3, 0);
  const auto batch_stride = joint_stride(info.shape, info.strides, leading);
  if (!batch_stride) return false;
  view = {info.data, info.dtype, nullptr, *batch_stride, info.rank > 2 ? info.strides[leading] : 0,
          info.strides[info.rank - 2], info.strides[info.rank - 1]};
  return true;
}

// The problem, and what it points to.
struct Described {
  Problem problem;
  std::vector<double> scales;
  Run queries, keys;
  double work, bytes;  // multiply-adds; size of the result
  bool tiny;
};

// False when the arrays do not fit together, or the call is not plain.
bool describe(const ArrayInfo& q, const ArrayInfo& k, const ArrayInfo& v, const Options& options, Described& plain) {
  Problem& problem = plain.problem;
  if (!fit(q, k, v) || !place(q, problem.q) || !place(k, problem.k) || !place(v, problem.v)) return false;
  problem.H = q.rank > 2 ? q.size(-3) : 1;
  problem.G = q.rank > 2 ? k.size(-3) : 1;
  problem.T = q.size(-2);
  problem.S = k.size(-2);
  problem.D = q.size(-1);
  problem.E = v.size(-1);
  double batch = 1;  // doubles do not overflow; views of stride 0 can be larger than memory
  for (int axis = 0; axis < q.rank - 3; ++axis) batch *= double(q.shape[axis]);
  const double rows = batch * double(problem.H) * double(problem.T);
  plain.work = rows * double(problem.S) * (double(problem.D) + double(problem.E));
  plain.tiny = plain.work <= tiny_work && batch * double(problem.H) <= tiny_heads;
  plain.bytes = rows * double(problem.E) * double(item_bytes(q.dtype));
  if (plain.work > most_work || plain.bytes > most_bytes) return false;
  problem.B = static_cast<std::int64_t>(batch);

  // The default of scaling.py, and the limits of scoring.py.
  const double scale = options.scale.value_or(1.0 / std::sqrt(double(problem.D)));
  const double reach = q.dtype == DType::f64 ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
  if (!(std::abs(scale) <= reach)) return false;
  plain.scales.assign(problem.H, scale);
  plain.queries = {problem.S - problem.T, problem.T, 1};  // the last query is at the last key
  plain.keys = {0, problem.S, 1};
  problem.scoring.scale = plain.scales.data();
  problem.scoring.causal = options.causal;
  problem.scoring.queries = {&plain.queries, 1, nullptr};
  problem.scoring.keys = {&plain.keys, 1, nullptr};
  return true;
}

// Whether PyTorch's fused kernel would take the call: sdpa.py, lays_out_as_query, for plain calls.
bool torchs_kernel_serves(const ArrayInfo& q, const ArrayInfo& k, const ArrayInfo& v) {
  const std::int64_t unit = item_bytes(q.dtype);
  return q.rank == 4 && v.size(-1) == q.size(-1) && q.strides[3] == unit && k.strides[3] == unit && v.strides[3] == unit;
}

template <class Family>
nb::object serve(nb::handle q_, nb::handle k_, nb::handle v_, const Options& options, bool as_query) {
  Family family;
  ArrayInfo q, k, v;
  Described plain;
  if (!family.inspect(0, q_.ptr(), q) || !family.inspect(1, k_.ptr(), k) || !family.inspect(2, v_.ptr(), v) ||
      !describe(q, k, v, options, plain))
    return nb::none();
  ArrayInfo out = q;
  out.shape[out.rank - 1] = plain.problem.E;
  if (as_query && torchs_kernel_serves(q, k, v)) close_gaps(out);
  else set_dense_strides(out);
  nb::object fresh = family.fresh(out);
  Result result;
  place(out, result.out);
  if (plain.tiny) {
    Interrupt never;
    forward(plain.problem, result, 1, never);
  } else {
    const bool given = options.threads.has_value();
    const int threads = given ? *options.threads : family.threads();
    run(threads, !given && Family::has_team,
        [&](Interrupt& interrupt) { return forward(plain.problem, result, threads, interrupt); });
  }
  return fresh;
}

}  // namespace

nb::object fast_attention(nb::handle q, nb::handle k, nb::handle v, nb::handle scale, nb::handle causal, nb::handle threads,
                          bool as_query) {
  PyTypeObject* const kind = Py_TYPE(q.ptr());
  if (Py_TYPE(k.ptr()) != kind || Py_TYPE(v.ptr()) != kind) return nb::none();
  const bool arrays = kind == numpy.array;
  if (!arrays && kind != torch.tensor.load(std::memory_order_acquire)) return nb::none();
  const auto options = read_options(scale, causal, threads);
  if (!options) return nb::none();
  return arrays ? serve<Arrays>(q, k, v, *options, false) : serve<Tensors>(q, k, v, *options, as_query);
}

void register_numpy() {
  const nb::module_ module = nb::module_::import_("numpy");
  numpy.array = reinterpret_cast<PyTypeObject*>(nb::object(module.attr("ndarray")).release().ptr());
  numpy.empty = nb::object(module.attr("empty")).release().ptr();
  const char* const names[] = {"float32", "float64", "float16"};
  for (int i = 0; i < 3; ++i) numpy.dtypes[i] = module.attr("dtype")(names[i]).release().ptr();
}

void register_torch(nb::handle module) {
  static bool registered = false;
  static nb::ft_mutex mutex;  // the GIL guards it, or this where there is none
  const nb::ft_lock_guard lock(mutex);
  if (registered) return;
  registered = true;
  const std::string file = nb::str(nb::getattr(module, "__file__", nb::none())).c_str();
  register_torch_team((file.substr(0, file.rfind('/') + 1) + "lib/libtorch_cpu.so").c_str());
  const nb::object tensor = module.attr("Tensor"), capsule = nb::getattr(tensor, "__dlpack_c_exchange_api__", nb::none());
  if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return;  // an older torch
  auto* api = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  while (api && api->version.major != dlpack::major_version) api = api->previous;
  if (!api || !api->borrow) return;
  torch.api = api;
  torch.module = nb::object(nb::borrow(module)).release().ptr();
  torch.is_grad_enabled = nb::object(module.attr("is_grad_enabled")).release().ptr();
  // torch.jit.is_tracing is a Python function around the other one, at about twice its cost.
  const nb::object jit = nb::getattr(module, "jit", nb::none()), direct = nb::getattr(module, "_C", nb::none());
  torch.is_tracing = nb::getattr(direct, "_is_tracing", nb::getattr(jit, "is_tracing", nb::object())).release().ptr();
  torch.requires_grad = PyUnicode_InternFromString("requires_grad");
  torch.forward_ad = nb::object(module.attr("autograd").attr("forward_ad")).release().ptr();
  torch.current_level = PyUnicode_InternFromString("_current_level");
  torch.is_neg = PyUnicode_InternFromString("is_neg");
  torch.tensor = reinterpret_cast<PyTypeObject*>(nb::object(tensor).release().ptr());
}

}  // namespace levelhead
