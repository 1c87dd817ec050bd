// Upper limits of this CPU, for the bench to compare with: fused multiply-adds in registers, and reading memory.
// Part of kernel.inl.h.
#pragma once

#include "kernel_tile.inl.h"

namespace levelhead {
namespace {

// Twelve independent chains hide the latency of an FMA on every CPU so far (latency 4 or 5, two a cycle).
constexpr int burn_chains = 12;
constexpr float burn_factor = 0.999f, burn_term = 0.001f;
constexpr float chain_start(int i) { return 2.0f + static_cast<float>(i); }
// A chain that starts where an FMA changes nothing is a constant: the compiler would remove it, and the peak would be
// too high by one chain in twelve.
constexpr bool all_chains_move() {
  for (int i = 0; i < burn_chains; ++i)
    if (chain_start(i) * burn_factor + burn_term == chain_start(i)) return false;
  return true;
}
static_assert(all_chains_move());

// Returns the flops done.
[[maybe_unused]] std::int64_t burn(std::int64_t rounds) {
  Vector<float> x[burn_chains];
  for (int i = 0; i < burn_chains; ++i) x[i] = splat(chain_start(i));
  const Vector<float> a = splat(burn_factor), b = splat(burn_term);
  for (std::int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < burn_chains; ++i) x[i] = x[i] * a + b;
  }
  float total = 0;
  for (int i = 0; i < burn_chains; ++i) total += sum<float>(x[i]);
  return rounds * burn_chains * lanes<float> * 2 + (total == 0);  // without the comparison the compiler would remove the loop
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
