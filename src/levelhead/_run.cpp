// Runs the core under Python: releases the GIL, handles Ctrl-C, and works after a fork. Nothing here reads arrays.
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <stdexcept>

#include "_binding.h"
#include "threads.h"

namespace nb = nanobind;

namespace levelhead {
namespace {

// Signals are handled on Python's main thread alone; others must not check for them, since Python ends
// a thread that waits for the GIL while the interpreter shuts down. A forked child's only thread is its main one.
std::atomic<unsigned long> main_thread{0};

bool python_wants_to_stop(void*) {
  nb::gil_scoped_acquire hold;
  return PyErr_CheckSignals() != 0;
}

// PyTorch's OpenMP team, from the first tensor on; null if PyTorch was built without OpenMP, or it cannot be found.
std::atomic<TeamCall> torch_team{nullptr};

}  // namespace

// dlsym on a handle finds what its library was linked with: the runtime that PyTorch itself uses, whichever others are loaded.
void register_torch_team(const char* library) {
  if (void* handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD)) {
    torch_team = reinterpret_cast<TeamCall>(dlsym(handle, "GOMP_parallel"));
    dlclose(handle);
  }
}

void remember_main_thread() {
  const nb::object main = nb::module_::import_("threading").attr("main_thread")();
  main_thread = nb::cast<unsigned long>(main.attr("ident"));
  pthread_atfork(nullptr, nullptr, [] { main_thread = PyThread_get_thread_ident(); });
}

void run(int threads, bool on_torchs_team, CoreCall call, const void* self) {
  Interrupt interrupt(PyThread_get_thread_ident() == main_thread ? python_wants_to_stop : nullptr, nullptr);
  bool finished;
  {
    nb::gil_scoped_release release;
    const Borrow team(on_torchs_team ? Team{torch_team, threads} : Team{});
    finished = call(self, interrupt);
  }
  if (finished) return;
  if (PyErr_Occurred()) throw nb::python_error();
  throw std::runtime_error("interrupted");  // a fork inside a signal handler: the child's loop has no workers
}

}  // namespace levelhead
