// The rows of a strip through the online softmax: scores in, weights 2^(s - m) out, the rows' states updated.
// Part of kernel.inl.h.
//
// Two sweeps over at most key_block numbers of each row, which sit in L1: one for the maximum, one for the exponentials.
// With statistics both compute more: the minimum, the sum and the sum of squares in the first, e * x and e^2 in the
// second, e being the weight. Two need another pass: deviations from a mean far from zero, the position of the maximum.
#pragma once

#include "kernel_math.inl.h"
#include "kernel_score.inl.h"
#include "state.h"

namespace levelhead {
namespace {

// A strip's rows of scores, `stride` apart.
template <class Real>
struct StripScores {
  Real* s;
  std::int64_t stride, n;
  int count;
};

// One number for each row of a strip, in whole vectors.
template <class Real>
constexpr int whole_rows = (tile_rows + lanes<Real> - 1) / lanes<Real> * lanes<Real>;

// From one vector for each row to one number for each row.
template <class Real, class Join>
LH_INLINE void across_rows(Vector<Real>* x, int count, Real* to, const Join& join) {
  for (int r = count; r < tile_rows; ++r) x[r] = Vector<Real>{};
  across<Real, tile_rows>(x, join);
  for (int i = 0; i < whole_rows<Real>; i += lanes<Real>) store(to + i, x[i / lanes<Real>]);
}
constexpr auto larger_of = [](auto a, auto b) { return larger(a, b); };
constexpr auto sum_of = [](auto a, auto b) { return a + b; };

// --- first sweep ---

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

// What the first sweep knows of the rows of a strip: a vector for each row.
template <class Real>
struct SweptRows {
  Vector<Real> max[tile_rows], low[tile_rows], total[tile_rows], squares[tile_rows], seen[tile_rows];
};

// Of n keys; the first `clear` are taken to be visible. If one of them is not, the minimum is -inf.
template <class Real>
LH_INLINE void first_sweep(const Real* s, std::int64_t clear, std::int64_t n, int r, SweptRows<Real>& swept) {
  const Vector<Real> nothing = splat(-infinity<Real>);
  Gathered<Real> found{{nothing, nothing}, {-nothing, -nothing}, {}, {}, {}};
  std::int64_t j = 0;
  for (; j < clear; j += panel<Real>) sweep_panel<false>(s + j, found);
  for (; j < n; j += panel<Real>) sweep_panel<true>(s + j, found);
  swept.max[r] = larger(found.max[0], found.max[1]);
  swept.low[r] = -smaller(found.min[0], found.min[1]);
  swept.total[r] = found.total[0] + found.total[1];
  swept.squares[r] = found.squares[0] + found.squares[1];
  swept.seen[r] = __builtin_convertvector(found.seen, Vector<Real>);
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

// Some vectors in step: s into 2^(s - m).
template <bool statistics, int vectors, class Real>
LH_INLINE void weigh_some(Real* s, Real m, Sums<Real>& sums) {
  Vector<Real> x[vectors], e[vectors];
#pragma GCC unroll 4
  for (int i = 0; i < vectors; ++i) x[i] = cut_off<Real>(load(s + i * lanes<Real>) - m);
  exp2_flushed<Real, vectors>(x, e);
#pragma GCC unroll 4
  for (int i = 0; i < vectors; ++i) {
    store(s + i * lanes<Real>, e[i]);
    sums.l[i % 2] += e[i];
    if constexpr (statistics) {
      sums.h[i % 2] += e[i] * x[i];
      sums.e2[i % 2] += e[i] * e[i];
    }
  }
}

// Turns s into 2^(s - m) and gathers the sums of this block about the maximum m.
template <bool statistics, class Real>
LH_INLINE Sums<Real> weigh_row(Real* s, std::int64_t n, Real m) {
  constexpr int together = statistics ? 2 : 4;
  Sums<Real> sums{};
  std::int64_t j = 0;
  for (; j + together * lanes<Real> <= n; j += together * lanes<Real>) weigh_some<statistics, together>(s + j, m, sums);
  if constexpr (together > 2)
    for (; j + 2 * lanes<Real> <= n; j += 2 * lanes<Real>) weigh_some<statistics, 2>(s + j, m, sums);
  if (j < n) weigh_some<statistics, 1>(s + j, m, sums);
  return sums;
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

// The key index (from `s`) of the first maximum; n is whole panels. Unpredictable, hence branch-free.
template <class Real>
LH_INLINE std::int64_t index_of(const Real* s, std::int64_t n, Real max) {
  Vector<Real> here = static_cast<Real>(n) + __builtin_convertvector(count_up<Real>(AllLanes<lanes<Real>>{}), Vector<Real>);
  Vector<Real> place[2] = {here, here};
  for (std::int64_t j = n; j > 0; j -= panel<Real>) {
    here -= Real(panel<Real>);
    place[0] = select(load(s + j - panel<Real>) == max, here, place[0]);
    place[1] = select(load(s + j - lanes<Real>) == max, here, place[1]);
  }
  return static_cast<std::int64_t>(smallest<Real>(smaller(place[0], place[1] + Real(lanes<Real>))));
}

// What the statistics of a strip need beside its scores.
template <class Real>
struct Noted {
  const Job& job;
  std::int64_t lo;            // the first key
  bool hidden;                // whether some score may be
  std::int64_t first[tile_rows];  // of each row: the key whose logit the state keeps
};

// The first sweep with statistics: all that a row's state gets from the scores themselves, its maximum apart.
template <class Real>
LH_INLINE void sweep_rows(const StripScores<Real>& scores, const Noted<Real>& noted, const Row<Real>* rows, Row<Real>* tile, Real* max) {
  constexpr int whole = whole_rows<Real>;
  const auto [s, stride, n, count] = scores;
  Real low[whole], total[whole], squares[whole], seen[whole];
  std::int64_t clear[tile_rows];
  SweptRows<Real> swept;
  const auto sweep_all = [&] {
    for (int r = 0; r < count; ++r) first_sweep(s + r * stride, clear[r], n, r, swept);
    across_rows(swept.max, count, max, larger_of);
    across_rows(swept.low, count, low, larger_of);
    across_rows(swept.total, count, total, sum_of);
    across_rows(swept.squares, count, squares, sum_of);
    across_rows(swept.seen, count, seen, sum_of);
  };
  for (int r = 0; r < count; ++r) clear[r] = noted.hidden ? likely_clear(s + r * stride, n) : n;
  sweep_all();
  bool wrong = false;  // something is hidden where nothing seemed to be, or a logit is -inf by itself
  for (int r = 0; r < count; ++r) {
    if (low[r] == infinity<Real>) {
      clear[r] = 0;
      wrong = true;
    }
  }
  if (wrong) sweep_all();
  for (int r = 0; r < count; ++r) {
    const Real* row = s + r * stride;
    // The count as a sum of reals, which is exact, because a block is short.
    const Sweep<Real> sweep{max[r], -low[r], total[r], squares[r], clear[r] < n ? clear[r] + static_cast<std::int64_t>(seen[r]) : n};
    tile[r] = Row<Real>{};
    moments(row, n, sweep, tile[r]);
    tile[r].min = sweep.min;
    if (sweep.max > rows[r].max) tile[r].argmax = noted.job.position(noted.lo + index_of(row, n, sweep.max));
    const std::int64_t first = noted.first[r] - noted.lo;
    if (first >= 0 && first < n) tile[r].first = row[first];
  }
}

// m and l of all rows joined with those of this block, which are about the joint maximum already: merge_softmax for a strip.
template <class Real>
LH_INLINE void join_rows(Row<Real>* rows, int count, const Real* before, const Real* max, const Real* l, Real* share) {
  const Vector<Real> nothing = splat(-infinity<Real>), zero{};
  bool moved = false;
  for (int i = 0; i < whole_rows<Real>; i += lanes<Real>) {
    const Vector<Real> was = load(before + i), is = load(max + i);
    store(share + i, select(was == nothing, zero, splat(Real(1))));
    moved = moved || any<Real>((was != is) & (was != nothing));
  }
  if (moved)
    for (int r = 0; r < count; ++r) share[r] = side_share(before[r], max[r]);
  for (int r = 0; r < count; ++r) {
    rows[r].max = max[r];
    rows[r].l = fused(rows[r].l, share[r], l[r]);
  }
}

// The rows of a strip; n is whole vectors, with statistics whole panels. What is taken across lanes is taken for all rows at once:
// alone it is a chain of fifty cycles. share[r] is the factor for row r's acc before this block's values are added. Calls between()
// before each row's exponentials.
template <bool statistics, class Real, class Between>
LH_INLINE void softmax_strip(const StripScores<Real>& scores, const Noted<Real>& noted, Row<Real>* rows, Real* share,
                             const Between& between) {
  constexpr int whole = whole_rows<Real>;
  const auto [s, stride, n, count] = scores;
  Row<Real> tile[statistics ? tile_rows : 1];
  Vector<Real> x[tile_rows], h[statistics ? tile_rows : 1], e2[statistics ? tile_rows : 1];
  Real before[whole], max[whole], below[whole], l[whole];
  if constexpr (statistics) {
    sweep_rows(scores, noted, rows, tile, max);
  } else {
    for (int r = 0; r < count; ++r) x[r] = maxima(s + r * stride, n);
    across_rows(x, count, max, larger_of);
  }
  for (int r = 0; r < count; ++r) before[r] = rows[r].max;
  for (int r = count; r < whole; ++r) before[r] = Real(0);
  bool blind = false;
  for (int i = 0; i < whole; i += lanes<Real>) {
    const Vector<Real> joint = larger(load(max + i), load(before + i));
    store(max + i, joint);
    store(below + i, joint);
    blind = blind || any_is<Real>(joint, -infinity<Real>);
  }
  if (blind)
    for (int r = 0; r < count; ++r) below[r] = reference(s + r * stride, n, max[r]);
  for (int r = 0; r < count; ++r) {
    between();
    const Sums<Real> sums = weigh_row<statistics>(s + r * stride, n, below[r]);
    x[r] = sums.l[0] + sums.l[1];
    if constexpr (statistics) {
      h[r] = sums.h[0] + sums.h[1];
      e2[r] = sums.e2[0] + sums.e2[1];
    }
  }
  across_rows(x, count, l, sum_of);
  if constexpr (statistics) {
    Real h_sum[whole], e2_sum[whole];
    across_rows(h, count, h_sum, sum_of);
    across_rows(e2, count, e2_sum, sum_of);
    for (int r = 0; r < count; ++r) {
      tile[r].max = max[r];
      tile[r].l = l[r];
      tile[r].h = h_sum[r];
      tile[r].e2 = e2_sum[r];
      share[r] = merge(rows[r], tile[r]).a;
    }
  } else {
    join_rows(rows, count, before, max, l, share);
  }
}

}  // namespace
}  // namespace levelhead
