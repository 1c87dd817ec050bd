// The core as the package's other extensions call it: through functions of `_core`, so that a process has one pool of
// threads and one choice of ISA, however many extensions it loads.
#pragma once

#include "attention.h"

namespace levelhead {

// Why a call failed, if it did. Nothing is thrown from one extension into another: each may have a C++ library of its own,
// which does not know the other's exceptions, and the process would end.
struct Failure {
  enum { none, argument, other } kind = none;
  char why[256];
};

struct SharedCore {
  void (*forward)(const Problem&, const Result&, int threads, Interrupt&, Failure&);
  void (*backward)(const Problem&, const Gradients&, int threads, Interrupt&, Failure&);
  int (*default_threads)();
};
inline constexpr const char* shared_core_name = "levelhead._core._shared";

}  // namespace levelhead
