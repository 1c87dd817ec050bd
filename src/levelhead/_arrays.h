// The binding's own part of the way from Python to a Problem (_problem.h): objects with the buffer protocol as memory,
// and keyword arguments as options.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <initializer_list>
#include <list>
#include <string>

#include "_problem.h"

namespace nb = nanobind;

namespace levelhead {
namespace {

// The memory of Python's arrays, borrowed as long as this lives.
class Buffers {
 public:
  Buffers() = default;
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;
  ~Buffers() {
    for (Py_buffer& view : views_) PyBuffer_Release(&view);
  }

  Memory memory(nb::handle object, const char* name, bool writable = false) {
    Py_buffer view;
    if (PyObject_GetBuffer(object.ptr(), &view, writable ? PyBUF_RECORDS : PyBUF_RECORDS_RO) != 0) throw nb::python_error();
    views_.push_back(view);
    const char format = view.format[std::strspn(view.format, "@=<")];
    if (!format || !std::strchr("fdeH?lq", format))
      throw nb::type_error((std::string(name) + ": unsupported buffer format " + view.format).c_str());
    return {view.buf, format, {view.shape, view.shape + view.ndim}, {view.strides, view.strides + view.ndim}};
  }
  std::optional<Memory> maybe(nb::handle object, const char* name, bool writable = false) {
    if (object.is_none()) return std::nullopt;
    return memory(object, name, writable);
  }

 private:
  std::list<Py_buffer> views_;
};

// The options by their names in Python. Each is read once; a name that was never read is an error.
class Options final : public Arguments {
 public:
  // `written`: the arrays among them that results are written to.
  Options(const nb::kwargs& given, Buffers& buffers, std::initializer_list<const char*> written)
      : given_(given), buffers_(buffers), written_(written) {}

  std::optional<Memory> array(const char* name) override {
    const bool writable = std::any_of(written_.begin(), written_.end(), [&](const char* x) { return !std::strcmp(x, name); });
    return buffers_.maybe(object(name), name, writable);
  }
  bool flag(const char* name) override { return get(name, false); }
  double number(const char* name) override { return get(name, 0.0); }
  std::int64_t integer(const char* name, std::int64_t otherwise) override { return get(name, otherwise); }
  std::uint64_t seed() override { return get("seed", std::uint64_t(0)); }
  std::optional<Runs> runs(const char* name) override {
    const nb::handle found = object(name);
    if (found.is_none()) return std::nullopt;
    return nb::cast<Runs>(found);
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
  nb::handle object(const char* name) {
    PyObject* found = PyDict_GetItemString(given_.ptr(), name);
    if (!found) return Py_None;
    ++read_;
    return found;
  }

  const nb::kwargs& given_;
  Buffers& buffers_;
  const std::initializer_list<const char*> written_;
  std::size_t read_ = 0;
};

}  // namespace
}  // namespace levelhead
