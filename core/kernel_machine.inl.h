// Upper limits of this CPU, for the bench to compare with: fused multiply-adds in registers, and reading memory.
// Part of kernel.inl.h.
#pragma once

#include "kernel_tile.inl.h"

namespace levelhead {
namespace {

// Twelve independent chains hide the latency of an FMA on every CPU so far (latency 4 or 5, two a cycle).
// Returns the flops done.
[[maybe_unused]] std::int64_t burn(std::int64_t rounds) {
  constexpr int chains = 12;
  Vector<float> x[chains];
  for (int i = 0; i < chains; ++i) x[i] = splat(1.0f + static_cast<float>(i));
  const Vector<float> a = splat(0.999f), b = splat(0.001f);
  for (std::int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < chains; ++i) x[i] = x[i] * a + b;
  }
  float total = 0;
  for (int i = 0; i < chains; ++i) total += sum<float>(x[i]);
  return rounds * chains * lanes<float> * 2 + (total == 0);  // without the comparison the compiler would remove the loop
}

// The sum of n floats, with enough streams in flight to be bound by memory alone.
[[maybe_unused]] float sweep(const float* x, std::int64_t n) {
  constexpr int streams = 8, step = streams * lanes<float>;
  Vector<float> total[streams] = {};
  std::int64_t i = 0;
  for (; i + step <= n; i += step) {
#pragma GCC unroll 8
    for (int s = 0; s < streams; ++s) total[s] += load(x + i + s * lanes<float>);
  }
  float result = 0;
  for (int s = 0; s < streams; ++s) result += sum<float>(total[s]);
  for (; i < n; ++i) result += x[i];
  return result;
}

}  // namespace
}  // namespace levelhead
