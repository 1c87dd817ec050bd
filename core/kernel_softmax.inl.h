// One row of a strip through the online softmax: scores in, weights 2^(s - m) out, the row's state moved on.
// Part of kernel.inl.h.
//
// Two sweeps over at most key_block numbers that sit in L1: one for the maximum, one for the exponentials.
// The statistics ride on both: the sum and the minimum on the first; on the second the squared deviations from
// the block's own mean (known by then, so nothing cancels), e * x and e^2, e being the weight.
#pragma once

#include "kernel_math.inl.h"
#include "kernel_score.inl.h"
#include "state.h"

namespace levelhead {
namespace {

template <class Real>
struct Sweep {
  Real max, min, total;
  std::int64_t count;
};

template <class Real, bool statistics, bool hidden>
LH_INLINE Sweep<Real> first_sweep(const Real* s, std::int64_t n) {
  const Vector<Real> nothing = splat(-infinity<Real>), zero{};
  // Two chains: the latency of a maximum is longer than the time of its loads.
  Vector<Real> max[2] = {nothing, nothing}, min[2] = {-nothing, -nothing}, total[2] = {zero, zero};
  Integers<Real> seen{};
  for (std::int64_t j = 0; j < n; j += 2 * lanes<Real>) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const Vector<Real> x = load(s + j + half * lanes<Real>);
      max[half] = larger(max[half], x);
      if constexpr (statistics && hidden) {
        const Integers<Real> visible = x != nothing;
        total[half] += select(visible, x, zero);
        min[half] = smaller(min[half], select(visible, x, -nothing));
        seen -= visible;  // a set lane is -1
      } else if constexpr (statistics) {
        total[half] += x;
        min[half] = smaller(min[half], x);
      }
    }
  }
  Sweep<Real> sweep{largest<Real>(larger(max[0], max[1])), 0, 0, n};
  if constexpr (statistics) {
    sweep.min = smallest<Real>(smaller(min[0], min[1]));
    sweep.total = sum<Real>(total[0] + total[1]);
  }
  if constexpr (statistics && hidden) {
    sweep.count = 0;
    for (int i = 0; i < lanes<Real>; ++i) sweep.count += seen[i];
  }
  return sweep;
}

// Turns s into 2^(s - m) and gathers the sums of this block about the maximum m.
template <class Real, bool statistics, bool hidden>
LH_INLINE void second_sweep(Real* s, std::int64_t n, Real m, Row<Real>& tile) {
  const Vector<Real> zero{}, nothing = splat(-infinity<Real>);
  Vector<Real> l[2] = {zero, zero}, h[2] = {zero, zero}, e2[2] = {zero, zero}, m2[2] = {zero, zero};
  for (std::int64_t j = 0; j < n; j += 2 * lanes<Real>) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const Vector<Real> logit = load(s + j + half * lanes<Real>);
      const Vector<Real> x = cut_off<Real>(logit - m);
      const Vector<Real> e = exp2_flushed<Real>(x);
      store(s + j + half * lanes<Real>, e);
      l[half] += e;
      if constexpr (statistics) {
        Vector<Real> deviation = logit - tile.mean;
        if constexpr (hidden) deviation = select(logit != nothing, deviation, zero);
        m2[half] += deviation * deviation;
        h[half] += e * x;
        e2[half] += e * e;
      }
    }
  }
  tile.max = m;
  tile.l = sum<Real>(l[0] + l[1]);
  if constexpr (statistics) {
    tile.m2 = sum<Real>(m2[0] + m2[1]);
    tile.h = sum<Real>(h[0] + h[1]);
    tile.e2 = sum<Real>(e2[0] + e2[1]);
  }
}

template <class Real>
bool holds_nan(const Real* s, std::int64_t n) {
  Integers<Real> found{};
  for (std::int64_t j = 0; j < n; j += lanes<Real>) found |= load(s + j) != load(s + j);
  return any<Real>(found);
}

// The key index (from `s`) of the first maximum.
template <class Real>
std::int64_t index_of(const Real* s, Real max) {
  std::int64_t j = 0;
  while (s[j] != max) ++j;
  return j;
}

// Returns what the row's acc must be multiplied with before this block's values are added.
template <class Real, bool statistics, bool hidden>
Real softmax_row(const Job& job, Real* s, std::int64_t lo, std::int64_t n, Row<Real>& row) {
  Sweep<Real> sweep = first_sweep<Real, statistics, hidden>(s, n);
  if constexpr (statistics && !hidden)
    if (sweep.min == -infinity<Real>) return softmax_row<Real, true, true>(job, s, lo, n, row);

  Row<Real> tile;
  if constexpr (statistics) {
    tile.count = sweep.count;
    tile.min = sweep.min;
    if (sweep.count > 0) tile.mean = sweep.total / static_cast<Real>(sweep.count);
    if (sweep.max > row.max)
      tile.argmax = (job.key_positions ? job.key_positions[lo + index_of(s, sweep.max)]
                                       : job.key_start + lo + index_of(s, sweep.max));
    if (!job.key_positions && job.key_start + lo <= 0 && job.key_start + lo + n > 0) tile.first = s[-job.key_start - lo];
    if (job.key_positions)
      for (std::int64_t j = 0; j < least(n, job.problem->S - lo); ++j)
        if (job.key_positions[lo + j] == 0) tile.first = s[j];
  }
  Real m = sweep.max > row.max ? sweep.max : row.max;
  if (m == -infinity<Real>) {  // nothing to see, unless the maximum passed over a NaN
    if (!holds_nan(s, n)) {
      for (std::int64_t j = 0; j < n; ++j) s[j] = 0;
      return Real(1);
    }
    m = __builtin_nan("");
  }
  second_sweep<Real, statistics, hidden>(s, n, m, tile);
  if constexpr (statistics) return merge(row, tile).a;
  return merge_softmax(row, tile).a;
}

}  // namespace
}  // namespace levelhead
