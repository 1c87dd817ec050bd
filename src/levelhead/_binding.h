// The binding's functions and types that several of its files use.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "attention.h"

namespace levelhead {

// _run.cpp: calls the core (false: interrupted) with the GIL released; handles Ctrl-C, and throws what a signal handler
// raised. On PyTorch's team `threads` must be PyTorch's own number: its workers still spin after its last operation, on
// the cores that our pool would use.
using CoreCall = bool (*)(const void* self, Interrupt& interrupt);
void run(int threads, bool on_torchs_team, CoreCall call, const void* self);

template <class Call>
void run(int threads, bool on_torchs_team, const Call& call) {
  run(threads, on_torchs_team,
      [](const void* self, Interrupt& interrupt) { return (*static_cast<const Call*>(self))(interrupt); }, &call);
}
void register_torch_team(const char* library);  // the path of PyTorch's libtorch_cpu
void remember_main_thread();

// _fast_call.cpp: computes a plain call, from objects to result. None for any other call: attention.py handles it.
// as_query: a tensor is laid out in memory as PyTorch's own attention would; otherwise the last axis is the fastest.
nanobind::object fast_attention(nanobind::handle q, nanobind::handle k, nanobind::handle v, nanobind::handle scale,
                        nanobind::handle causal, nanobind::handle threads, bool as_query);
void register_numpy();
void register_torch(nanobind::handle torch);  // fast_attention then accepts tensors, if C can read them

}  // namespace levelhead
