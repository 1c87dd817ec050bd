// The rows of a strip through the online softmax: scores in, weights 2^(s - m) out, the rows' states updated.
// Part of kernel.inl.h.
//
// Two sweeps over at most key_block numbers that sit in L1: one for the maximum, one for the exponentials.
// With statistics a row goes alone, and both compute more: the minimum, the sum and the sum of squares in the first,
// e * x and e^2 in the second, e being the weight. Two need another pass: deviations from a mean far from zero, the
// position of the maximum.
#pragma once

#include "kernel_math.inl.h"
#include "kernel_score.inl.h"
#include "state.h"

namespace levelhead {
namespace {

template <class Real>
struct Sweep {
  Real max, min, total, squares;
  std::int64_t count;
};

// Results of a sweep, one chain for each half of a panel: a maximum's latency is longer than the time of its loads.
template <class Real>
struct Gathered {
  Vector<Real> max[2], min[2], total[2], squares[2];
  Integers<Real> seen;
};

// The extremes ignore NaN, so that they change in one direction only.
template <bool hidden, class Real>
LH_INLINE void sweep_panel(const Real* s, Gathered<Real>& found) {
  const Vector<Real> nothing = splat(-infinity<Real>), zero{};
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    Vector<Real> x = load(s + half * lanes<Real>);
    found.max[half] = larger(x, found.max[half]);
    Vector<Real> low = x;
    if constexpr (hidden) {
      const Integers<Real> visible = x != nothing;
      low = select(visible, x, -nothing);
      x = select(visible, x, zero);
      found.seen -= visible;  // a set lane is -1
    }
    found.min[half] = smaller(low, found.min[half]);
    found.total[half] += x;
    found.squares[half] += x * x;
  }
}

// The keys between two landmarks: maxima recorded during the sweep.
template <class Real>
constexpr std::int64_t leg = 4 * panel<Real>;

// Of n keys; the first `clear` are taken to be visible. If one of them is not, the minimum is -inf.
// The maximum so far in each lane is stored after every leg, to find the maximum's position.
template <class Real>
LH_INLINE Sweep<Real> first_sweep(const Real* s, std::int64_t clear, std::int64_t n, Vector<Real>* landmarks) {
  const Vector<Real> nothing = splat(-infinity<Real>);
  Gathered<Real> found{{nothing, nothing}, {-nothing, -nothing}, {}, {}, {}};
  for (std::int64_t j = 0, end; j < n; j = end) {
    end = least(j + leg<Real>, n);
    for (; j < least(clear, end); j += panel<Real>) sweep_panel<false>(s + j, found);
    for (; j < end; j += panel<Real>) sweep_panel<true>(s + j, found);
    *landmarks++ = larger(found.max[0], found.max[1]);
  }
  const Vector<Real> max = larger(found.max[0], found.max[1]);
  const Pair<Real> ends = largest<Real>(max, -smaller(found.min[0], found.min[1]));
  const Pair<Real> sums = sum<Real>(found.total[0] + found.total[1], found.squares[0] + found.squares[1]);
  // The count as a sum of reals, which is exact, because a block is short.
  return {ends.a, -ends.b, sums.a, sums.b,
          clear < n ? clear + static_cast<std::int64_t>(sum<Real>(__builtin_convertvector(found.seen, Vector<Real>))) : n};
}

// Squared deviations from the mean, of the visible keys.
template <class Real>
[[gnu::noinline]] Real deviations(const Real* s, std::int64_t n, Real mean) {
  const Vector<Real> nothing = splat(-infinity<Real>), zero{};
  Vector<Real> total[2] = {};
  for (std::int64_t j = 0; j < n; j += panel<Real>)
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const Vector<Real> x = load(s + j + half * lanes<Real>);
      const Vector<Real> deviation = select(x != nothing, x - mean, zero);
      total[half] += deviation * deviation;
    }
  return sum<Real>(total[0] + total[1]);
}

// The mean where the sum of the logits overflows. Halves, so that differences do not; of equal logits it is exact, so that
// their deviations are zero.
template <class Real>
[[gnu::noinline]] Real far_mean(const Real* s, std::int64_t n, const Sweep<Real>& sweep) {
  const Vector<Real> nothing = splat(-infinity<Real>), zero{};
  const Real half = sweep.max * Real(0.5), part = Real(2) / static_cast<Real>(sweep.count);
  Vector<Real> total = zero;
  for (std::int64_t j = 0; j < n; j += lanes<Real>) {
    const Vector<Real> x = load(s + j);
    total += select(x != nothing, (x * Real(0.5) - half) * part, zero);
  }
  return sweep.max + sum<Real>(total);
}

// The moments of a block. Where its mean is near zero, the deviations come from the squares; where that would cancel
// more than two bits (or overflow, or give NaN), they are computed one by one.
template <class Real>
LH_INLINE void moments(const Real* s, std::int64_t n, const Sweep<Real>& sweep, Row<Real>& tile) {
  tile.count = sweep.count;
  if (sweep.count == 0) return;
  tile.mean = sweep.total - sweep.total == 0 ? sweep.total / static_cast<Real>(sweep.count) : far_mean(s, n, sweep);
  tile.m2 = sweep.squares - tile.mean * sweep.total;
  if (!(sweep.squares <= 4 * tile.m2 && sweep.squares < infinity<Real>)) tile.m2 = deviations(s, n, tile.mean);
}

// Sums of a block about its maximum, one chain for each half of a panel.
template <class Real>
struct Sums {
  Vector<Real> l[2], h[2], e2[2];
};

// One panel: s into 2^(s - m).
template <bool statistics, class Real>
LH_INLINE void weigh_panel(Real* s, Real m, Sums<Real>& sums) {
  const Vector<Real> x[2] = {cut_off<Real>(load(s) - m), cut_off<Real>(load(s + lanes<Real>) - m)};
  Vector<Real> e[2];
  exp2_flushed<Real, 2>(x, e);
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    store(s + half * lanes<Real>, e[half]);
    sums.l[half] += e[half];
    if constexpr (statistics) {
      sums.h[half] += e[half] * x[half];
      sums.e2[half] += e[half] * e[half];
    }
  }
}

// Turns s into 2^(s - m) and gathers the sums of this block about the maximum m.
template <class Real>
LH_INLINE void second_sweep(Real* s, std::int64_t n, Real m, Row<Real>& tile) {
  Sums<Real> sums{};
  for (std::int64_t j = 0; j < n; j += panel<Real>) weigh_panel<true>(s + j, m, sums);
  const Pair<Real> both = sum<Real>(sums.l[0] + sums.l[1], sums.h[0] + sums.h[1]);
  tile.l = both.a;
  tile.h = both.b;
  tile.e2 = sum<Real>(sums.e2[0] + sums.e2[1]);
}

// The sweeps without statistics, of which each lane keeps its own maximum and sum.
template <class Real>
LH_INLINE Vector<Real> maxima(const Real* s, std::int64_t n) {
  Vector<Real> max[2] = {splat(-infinity<Real>), splat(-infinity<Real>)};
  std::int64_t j = 0;
  for (; j + panel<Real> <= n; j += panel<Real>)
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) max[half] = larger(load(s + j + half * lanes<Real>), max[half]);
  if (j < n) max[0] = larger(load(s + j), max[0]);
  return larger(max[0], max[1]);
}
template <class Real>
LH_INLINE Vector<Real> weigh_row(Real* s, std::int64_t n, Real m) {
  Sums<Real> sums{};
  std::int64_t j = 0;
  for (; j + panel<Real> <= n; j += panel<Real>) weigh_panel<false>(s + j, m, sums);
  if (j < n) {
    const Vector<Real> e = exp2_flushed<Real>(cut_off<Real>(load(s + j) - m));
    store(s + j, e);
    sums.l[0] += e;
  }
  return sums.l[0] + sums.l[1];
}

// How many of the first keys are likely to be visible, in whole panels. Most rows that hide something (causal, lengths) hide
// the last keys: then only one of their panels needs a test for each lane. The sweep detects a wrong guess.
template <class Real>
LH_INLINE std::int64_t likely_clear(const Real* s, std::int64_t n) {
  const auto hides = [&](std::int64_t j) { return any_is(smaller(load(s + j), load(s + j + lanes<Real>)), -infinity<Real>); };
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

// What is subtracted from scores with this maximum. A row that sees nothing gets weights of zero, unless the maximum ignored
// a NaN.
template <class Real>
LH_INLINE Real reference(const Real* s, std::int64_t n, Real max) {
  if (max > -infinity<Real>) return max;
  return holds_nan(s, n) ? static_cast<Real>(__builtin_nan("")) : Real(0);
}

// The key index (from `s`) of the first maximum. Unpredictable, hence branch-free: the number of landmarks below the maximum
// gives its leg, and there every key is compared.
template <class Real>
LH_INLINE std::int64_t index_of(const Real* s, std::int64_t n, Real max, const Vector<Real>* landmarks) {
  std::int64_t from = 0;
  for (std::int64_t end = leg<Real>; end < n; end += leg<Real>) from += any_is<Real>(*landmarks++, max) ? 0 : leg<Real>;
  from = least(from, most(n - leg<Real>, 0));  // where the last leg is short, it begins earlier
  std::int64_t j = least(leg<Real>, n);
  Vector<Real> here = static_cast<Real>(j) + __builtin_convertvector(count_up<Real>(AllLanes<lanes<Real>>{}), Vector<Real>);
  Vector<Real> place = here;
  while (j > 0) {
    j -= lanes<Real>;
    here -= Real(lanes<Real>);
    place = select(load(s + from + j) == max, here, place);
  }
  return from + static_cast<std::int64_t>(smallest<Real>(place));
}

// With statistics; n is whole panels. Returns the factor for the row's acc before this block's values are added. `first`:
// the key whose logit the state keeps.
template <class Real>
Real softmax_row(const Job& job, Real* s, std::int64_t lo, std::int64_t n, bool hidden, std::int64_t first, Row<Real>& row) {
  Vector<Real> landmarks[(split_keys + leg<Real> - 1) / leg<Real>];
  Sweep<Real> sweep = first_sweep(s, hidden ? likely_clear(s, n) : n, n, landmarks);
  if (sweep.min == -infinity<Real>) sweep = first_sweep(s, 0, n, landmarks);

  Row<Real> tile;
  moments(s, n, sweep, tile);
  tile.min = sweep.min;
  if (sweep.max > row.max) tile.argmax = job.position(lo + index_of(s, n, sweep.max, landmarks));
  if (first >= lo && first < lo + n) tile.first = s[first - lo];
  tile.max = sweep.max > row.max ? sweep.max : row.max;
  second_sweep(s, n, reference(s, n, tile.max), tile);
  return merge(row, tile).a;
}

// Without: all rows of a strip, `stride` apart. What is taken across lanes is taken for all rows at once: alone it is a chain of
// fifty cycles. n is whole vectors. Calls between() before each row's exponentials.
template <class Real, class Between>
LH_INLINE void softmax_rows(Real* s, std::int64_t stride, std::int64_t n, int count, Row<Real>* rows, Real* share,
                            const Between& between) {
  constexpr int whole = (tile_rows + lanes<Real> - 1) / lanes<Real> * lanes<Real>;
  Vector<Real> x[tile_rows];
  Real max[whole], l[whole];
  const auto across_lanes = [&](Real* to, const auto& join) {
    across<Real, tile_rows>(x, join);
    for (int i = 0; i < whole; i += lanes<Real>) store(to + i, x[i / lanes<Real>]);
  };
  for (int r = 0; r < count; ++r) x[r] = maxima(s + r * stride, n);
  for (int r = count; r < tile_rows; ++r) x[r] = Vector<Real>{};
  across_lanes(max, [](Vector<Real> a, Vector<Real> b) { return larger(a, b); });
  for (int r = 0; r < count; ++r) {
    between();
    max[r] = max[r] > rows[r].max ? max[r] : rows[r].max;
    x[r] = weigh_row(s + r * stride, n, reference(s + r * stride, n, max[r]));
  }
  across_lanes(l, [](Vector<Real> a, Vector<Real> b) { return a + b; });
  for (int r = 0; r < count; ++r) {
    Row<Real> tile;
    tile.max = max[r];
    tile.l = l[r];
    share[r] = merge_softmax(rows[r], tile).a;
  }
}

}  // namespace
}  // namespace levelhead
