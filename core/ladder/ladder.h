// The ladder's types: one attention head, and the steps that compute it, once per ISA (steps_*.cpp).
// For reading and measuring only (docs/kernel.md); nothing here is linked into the library.
#pragma once

#include <cstdint>

namespace levelhead::ladder {

// Dense attention of T queries over S keys, all of width d, row-major. d is a whole number of `widths`.
struct Head {
  std::int64_t T, S, d;
  const float *q, *k, *v;
  float scale;
  float* out;
};
constexpr std::int64_t widths = 32;  // two vectors of the widest ISA

struct Recipe;  // steps.inl.h

struct Step {
  const char* name;
  void (*run)(const Head&, const Recipe*, float* room);
  const Recipe* recipe;  // null for the first step, which shares nothing with the others
  double work;           // share of the two products that is computed; less than 1: a part, which has no result
};

constexpr int part_count = 3;

struct Steps {
  const char* isa;
  const Step* steps;
  int count;
  const Step* parts;                  // of the last step: scores, softmax, values, each alone
  std::int64_t (*room)(const Head&);  // floats of scratch that any of them needs
};

void run_core(const Head& head);  // the step after the last: levelhead::forward, one thread

}  // namespace levelhead::ladder
