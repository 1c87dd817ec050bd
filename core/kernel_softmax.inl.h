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

// What a sweep gathers, one chain for each half of a panel: a maximum's latency is longer than the time of its loads.
template <class Real>
struct Gathered {
  Vector<Real> max[2], min[2], total[2];
  Integers<Real> seen;
};

template <class Real, bool statistics, bool hidden>
LH_INLINE void sweep_panel(const Real* s, Gathered<Real>& found) {
  const Vector<Real> nothing = splat(-infinity<Real>), zero{};
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const Vector<Real> x = load(s + half * lanes<Real>);
    found.max[half] = larger(found.max[half], x);
    if constexpr (statistics && hidden) {
      const Integers<Real> visible = x != nothing;
      found.total[half] += select(visible, x, zero);
      found.min[half] = smaller(found.min[half], select(visible, x, -nothing));
      found.seen -= visible;  // a set lane is -1
    } else if constexpr (statistics) {
      found.total[half] += x;
      found.min[half] = smaller(found.min[half], x);
    }
  }
}

// Of n keys; the first `clear` are taken to be visible. If one of them is not, the minimum is -inf.
template <class Real, bool statistics>
LH_INLINE Sweep<Real> first_sweep(const Real* s, std::int64_t clear, std::int64_t n) {
  const Vector<Real> nothing = splat(-infinity<Real>);
  Gathered<Real> found{{nothing, nothing}, {-nothing, -nothing}, {}, {}};
  for (std::int64_t j = 0; j < clear; j += panel<Real>) sweep_panel<Real, statistics, false>(s + j, found);
  for (std::int64_t j = clear; j < n; j += panel<Real>) sweep_panel<Real, statistics, true>(s + j, found);
  Sweep<Real> sweep{largest<Real>(larger(found.max[0], found.max[1])), 0, 0, n};
  if constexpr (statistics) {
    sweep.min = smallest<Real>(smaller(found.min[0], found.min[1]));
    sweep.total = sum<Real>(found.total[0] + found.total[1]);
    // As a sum of reals, which is exact, because a block is short.
    if (clear < n) sweep.count = clear + static_cast<std::int64_t>(sum<Real>(__builtin_convertvector(found.seen, Vector<Real>)));
  }
  return sweep;
}

// Sums of a block about its maximum, one chain for each half of a panel.
template <class Real>
struct Sums {
  Vector<Real> l[2], h[2], e2[2], m2[2];
};

// One panel: s into 2^(s - m).
template <class Real, bool statistics, bool hidden>
LH_INLINE void weigh_panel(Real* s, Real m, Real mean, Sums<Real>& sums) {
  const Vector<Real> zero{}, nothing = splat(-infinity<Real>);
  const Vector<Real> logit[2] = {load(s), load(s + lanes<Real>)};
  const Vector<Real> x[2] = {cut_off<Real>(logit[0] - m), cut_off<Real>(logit[1] - m)};
  Vector<Real> e[2];
  exp2_flushed<Real, 2>(x, e);
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    store(s + half * lanes<Real>, e[half]);
    sums.l[half] += e[half];
    if constexpr (statistics) {
      Vector<Real> deviation = logit[half] - mean;
      if constexpr (hidden) deviation = select(logit[half] != nothing, deviation, zero);
      sums.m2[half] += deviation * deviation;
      sums.h[half] += e[half] * x[half];
      sums.e2[half] += e[half] * e[half];
    }
  }
}

// Turns s into 2^(s - m) and gathers the sums of this block about the maximum m.
template <class Real, bool statistics>
LH_INLINE void second_sweep(Real* s, std::int64_t clear, std::int64_t n, Real m, Row<Real>& tile) {
  Sums<Real> sums{};
  for (std::int64_t j = 0; j < clear; j += panel<Real>) weigh_panel<Real, statistics, false>(s + j, m, tile.mean, sums);
  for (std::int64_t j = clear; j < n; j += panel<Real>) weigh_panel<Real, statistics, true>(s + j, m, tile.mean, sums);
  tile.max = m;
  tile.l = sum<Real>(sums.l[0] + sums.l[1]);
  if constexpr (statistics) {
    tile.m2 = sum<Real>(sums.m2[0] + sums.m2[1]);
    tile.h = sum<Real>(sums.h[0] + sums.h[1]);
    tile.e2 = sum<Real>(sums.e2[0] + sums.e2[1]);
  }
}

// How many of the first keys are likely to be visible, in whole panels. Most rows that hide something (causal, lengths) hide
// the last keys: all but one of their panels are then spared the question lane by lane. A wrong guess is found by the sweep.
template <class Real>
LH_INLINE std::int64_t likely_clear(const Real* s, std::int64_t n) {
  const Vector<Real> nothing = splat(-infinity<Real>);
  const auto hides = [&](std::int64_t j) { return any<Real>((load(s + j) == nothing) | (load(s + j + lanes<Real>) == nothing)); };
  if (hides(0)) return 0;
  while (n > 0 && hides(n - panel<Real>)) n -= panel<Real>;
  return n;
}

template <class Real>
bool holds_nan(const Real* s, std::int64_t n) {
  Integers<Real> found{};
  for (std::int64_t j = 0; j < n; j += lanes<Real>) found |= load(s + j) != load(s + j);
  return any<Real>(found);
}

// The key index (from `s`) of the first maximum; a panel at a time, since in the first blocks it moves often,
// and within the panel without a branch, which nobody could foretell.
template <class Real>
LH_INLINE std::int64_t index_of(const Real* s, Real max) {
  std::int64_t j = 0;
  while (!any<Real>((load(s + j) == max) | (load(s + j + lanes<Real>) == max))) j += panel<Real>;
  Vector<Real> place;
  for (int i = 0; i < lanes<Real>; ++i) place[i] = static_cast<Real>(i);
  const Vector<Real> nowhere = splat(static_cast<Real>(panel<Real>)), width = splat(static_cast<Real>(lanes<Real>));
  const Vector<Real> left = select(load(s + j) == max, place, nowhere);
  const Vector<Real> right = select(load(s + j + lanes<Real>) == max, place + width, nowhere);
  return j + static_cast<std::int64_t>(smallest<Real>(smaller(left, right)));
}

// Returns what the row's acc must be multiplied with before this block's values are added.
template <class Real, bool statistics>
Real softmax_row(const Job& job, Real* s, std::int64_t lo, std::int64_t n, bool hidden, Row<Real>& row) {
  std::int64_t clear = statistics && hidden ? likely_clear(s, n) : n;
  Sweep<Real> sweep = first_sweep<Real, statistics>(s, clear, n);
  if (statistics && sweep.min == -infinity<Real>) sweep = first_sweep<Real, statistics>(s, clear = 0, n);

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
  second_sweep<Real, statistics>(s, clear, n, m, tile);
  if constexpr (statistics) return merge(row, tile).a;
  return merge_softmax(row, tile).a;
}

}  // namespace
}  // namespace levelhead
