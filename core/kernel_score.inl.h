// What happens to a strip of scores between the dot product and the softmax: softcap, ALiBi, bias, hide;
// and, before any of it is computed, which keys the strip can see at all. Part of kernel.inl.h.
//
// A strip is tile_rows consecutive query rows of one kv head (kernel.h, Piece). Hiding is always a select, never a sum: NaN or
// inf in a hidden key has no effect.
#pragma once

#include "kernel_math.inl.h"
#include "kernel_pack.inl.h"

namespace levelhead {
namespace {

struct Strip {
  std::int64_t b;                                  // the batch row
  std::int64_t rows;                               // how many are real; those beyond the last repeat it
  std::int64_t head[tile_rows], t[tile_rows];      // of each row's query
  std::int64_t position[tile_rows];                // absolute
  std::int64_t low[tile_rows], high[tile_rows];    // positions a row may see, inclusive
  std::int64_t begin[tile_rows], end[tile_rows];   // the same as key indices, end exclusive
  std::int64_t first, last;                        // union of [begin, end)
  std::int64_t common_first, common_last;          // intersection
  std::int64_t segment[tile_rows], min_segment, max_segment;
  double scale[tile_rows];  // what the dot products are multiplied with
  bool dead[tile_rows];     // the query does not exist (query_lengths)
};

// Keys [lo, hi) of a block that some row of the strip may see; `hide` when not every row sees all of them, `segments`
// when each key's segment must be compared.
struct Span {
  std::int64_t lo, hi;
  bool hide, segments;
};

// Scores of a row, or the first row of several: s[0] is key `lo`; n is whole panels and may pass the last key.
template <class Real>
struct Scores {
  Real* s;
  std::int64_t lo, n;
};


// Keys left to a row by position and segment: the n of the "log-n" rule.
std::int64_t keys_left(const Job& job, const Strip& strip, int r) {
  const Problem& problem = *job.problem;
  const std::int64_t* segments = problem.scoring.key_segments ? problem.scoring.key_segments + strip.b * problem.S : nullptr;
  if (!segments && !job.key_positions) return strip.end[r] - strip.begin[r];
  std::int64_t left = 0;
  for (std::int64_t j = strip.begin[r]; j < strip.end[r]; ++j) {
    const std::int64_t p = job.position(j);
    left += p >= strip.low[r] && p <= strip.high[r] && (!segments || segments[j] == strip.segment[r]);
  }
  return left;
}

// From positions to key indices.
LH_INLINE void see_keys(const Job& job, Strip& strip) {
  const std::int64_t S = job.problem->S, start = job.key_start, stride = job.key_stride;
  for (int r = 0; r < tile_rows; ++r) {
    strip.begin[r] = job.key_positions ? 0 : most(strip.low[r] - start, 0);  // how far from the first key
    strip.end[r] = job.key_positions ? S : most(strip.high[r] - start + 1, 0);
  }
  if (stride > 1)
    for (int r = 0; r < tile_rows; ++r) {  // rounded up, without a sum that may be too large
      strip.begin[r] = strip.begin[r] / stride + (strip.begin[r] % stride != 0);
      strip.end[r] = strip.end[r] / stride + (strip.end[r] % stride != 0);
    }
  for (int r = 0; r < tile_rows; ++r) {
    strip.begin[r] = least(strip.begin[r], S);
    strip.end[r] = least(most(strip.end[r], strip.begin[r]), S);
  }
}

// A row that does not exist sees no key. Everything else about the strip stays as it would be if the row existed: the
// bits of the other rows must not change. Without any row that exists, the strip sees nothing and costs nothing.
void remove_dead_rows(const Scoring& scoring, std::int64_t S, Strip& strip) {
  bool all = true;
  for (int r = 0; r < tile_rows; ++r) {
    strip.dead[r] = !scoring.has_query(strip.b, strip.t[r]);
    if (strip.dead[r]) strip.begin[r] = strip.end[r] = strip.common_last = 0;  // an empty intersection: something is hidden
    all = all && strip.dead[r];
  }
  if (all) {
    strip.first = S;
    strip.last = 0;
  }
}

// Field by field, so that the compiler can take several rows at once: a short head is no more than one or two strips.
void make_strip(const Job& job, const Piece& piece, std::int64_t row0, Strip& strip) {
  const Problem& problem = *job.problem;
  const Scoring& scoring = problem.scoring;
  const std::int64_t b = piece.b, S = problem.S;
  strip.b = b;
  strip.rows = least(piece.row1 - row0, tile_rows);
  const std::int64_t start = scoring.queries.batch_start ? scoring.queries.batch_start[b] : 0;
  std::int64_t head = piece.g * (problem.H / problem.G) + row0 / problem.T, t = row0 % problem.T;
  // The next operation is the softcap, on s / cap, or the softmax, in units of ln 2.
  const double unit = scoring.softcap > 0 ? 1 / scoring.softcap : log2_e;
  const Run& run = scoring.queries.runs[0];
  if (t + strip.rows <= problem.T && scoring.queries.run_count == 1) {  // neighbours: no row asks where the next one is
    for (int r = 0; r < tile_rows; ++r) {
      const std::int64_t i = least(r, strip.rows - 1);
      strip.head[r] = head;
      strip.t[r] = t + i;
      strip.position[r] = start + run.start + (t + i) * run.stride;
      strip.dead[r] = false;
      strip.scale[r] = scoring.scale[head] * unit;
    }
  } else {
    for (int r = 0; r < tile_rows; ++r) {
      strip.head[r] = head;
      strip.t[r] = t;
      strip.position[r] = start + scoring.queries.in_runs(t);
      strip.dead[r] = false;
      strip.scale[r] = scoring.scale[head] * unit;
      if (r + 1 < strip.rows && ++t == problem.T) {
        t = 0;
        ++head;
      }
    }
  }
  const std::int64_t right = scoring.causal ? 0 : scoring.right;
  const std::int64_t longest = scoring.key_lengths ? scoring.key_lengths[b] - 1 : unlimited;
  for (int r = 0; r < tile_rows; ++r) {
    strip.low[r] = most(strip.position[r] - scoring.left, -unlimited);
    strip.high[r] = least(strip.position[r] + right, longest);
  }
  see_keys(job, strip);
  strip.last = strip.common_first = 0;
  strip.first = strip.common_last = S;
  for (int r = 0; r < tile_rows; ++r) {
    strip.first = least(strip.first, strip.begin[r]);
    strip.last = most(strip.last, strip.end[r]);
    strip.common_first = most(strip.common_first, strip.begin[r]);
    strip.common_last = least(strip.common_last, strip.end[r]);
  }
  if (scoring.query_segments) {
    strip.min_segment = INT64_MAX;
    strip.max_segment = INT64_MIN;
    for (int r = 0; r < tile_rows; ++r) {
      strip.segment[r] = scoring.query_segments[b * problem.T + strip.t[r]];
      strip.min_segment = least(strip.min_segment, strip.segment[r]);
      strip.max_segment = most(strip.max_segment, strip.segment[r]);
    }
  }
  if (scoring.query_lengths) remove_dead_rows(scoring, S, strip);
  if (scoring.log_n)
    for (int r = 0; r < tile_rows; ++r) {
      const std::int64_t left = keys_left(job, strip, r);
      strip.scale[r] *= left > 0 ? __builtin_log(static_cast<double>(left)) : 0;
    }
}

// --- masks ---

// Whether a mask's element lets the key be seen.
LH_INLINE bool lets_see(const char* p, DType dtype) {
  switch (dtype) {
    case DType::boolean: return *p != 0;
    case DType::f32: return read<float>(p) != -infinity<float>;
    case DType::f64: return read<double>(p) != -infinity<double>;
    case DType::f16: return read<std::uint16_t>(p) != 0xFC00;
    case DType::bf16: return read<std::uint16_t>(p) != 0xFF80;
  }
  return true;
}

bool row_sees_any(const char* mask, DType dtype, std::int64_t stride, std::int64_t n) {
  std::int64_t j = 0;
  if (dtype == DType::boolean && stride == 1)
    for (; j + 8 <= n; j += 8)
      if (read<std::uint64_t>(mask + j)) return true;
  for (; j < n; ++j)
    if (lets_see(mask + j * stride, dtype)) return true;
  return false;
}

// Shrinks the span to what the mask leaves of it.
void narrow_by_mask(const Tensor& mask, const Strip& strip, Span& span) {
  // A few columns at a time: where the mask hides nothing, only its first and last columns are read.
  constexpr std::int64_t step = 16;
  const auto visible = [&](std::int64_t lo, std::int64_t hi) {
    for (std::int64_t r = 0; r < strip.rows; ++r)
      if (row_sees_any(mask.at(strip.b, strip.head[r], strip.t[r]) + lo * mask.column_stride, mask.dtype, mask.column_stride, hi - lo))
        return true;
    return false;
  };
  while (span.lo < span.hi && !visible(span.lo, least(span.lo + step, span.hi))) span.lo = least(span.lo + step, span.hi);
  while (span.lo < span.hi && !visible(most(span.hi - step, span.lo), span.hi)) span.hi = most(span.hi - step, span.lo);
  span.hide = span.hide || mask.dtype == DType::boolean;
}

// --- the span of a block ---

// Sorted ids (packed sequences) are searched, each being one run; others are compared one by one.
void narrow_by_segments(const Job& job, std::int64_t block, const Strip& strip, Span& span) {
  const BlockFacts& facts = job.facts[strip.b * job.plan->blocks + block];
  const std::int64_t* ids = job.problem->scoring.key_segments + strip.b * job.problem->S;
  if (facts.max_segment < strip.min_segment || facts.min_segment > strip.max_segment) span.hi = span.lo;
  if (facts.sorted) {
    const auto first_above = [&](std::int64_t bound) {  // the first key of the span whose id is at least `bound`
      std::int64_t lo = span.lo, hi = span.hi;
      while (lo < hi) {
        const std::int64_t middle = lo + (hi - lo) / 2;
        (ids[middle] < bound ? lo : hi) = ids[middle] < bound ? middle + 1 : middle;
      }
      return lo;
    };
    span.lo = first_above(strip.min_segment);
    if (strip.max_segment < INT64_MAX) span.hi = first_above(strip.max_segment + 1);
  } else {
    const auto related = [&](std::int64_t j) { return ids[j] >= strip.min_segment && ids[j] <= strip.max_segment; };
    while (span.lo < span.hi && !related(span.lo)) ++span.lo;
    while (span.lo < span.hi && !related(span.hi - 1)) --span.hi;
  }
  const bool one_run = facts.sorted || facts.min_segment == facts.max_segment;
  span.segments = !(one_run && strip.min_segment == strip.max_segment);
  span.hide = span.hide || span.segments;
}

void narrow_by_positions(const Job& job, std::int64_t block, const Strip& strip, Span& span) {
  const BlockFacts& facts = job.facts[strip.b * job.plan->blocks + block];
  std::int64_t low = strip.low[0], high = strip.high[0], common_low = low, common_high = high;
  for (int r = 1; r < tile_rows; ++r) {
    low = least(low, strip.low[r]);
    high = most(high, strip.high[r]);
    common_low = most(common_low, strip.low[r]);
    common_high = least(common_high, strip.high[r]);
  }
  if (facts.max_position < low || facts.min_position > high) span.hi = span.lo;
  span.hide = span.hide || facts.min_position < common_low || facts.max_position > common_high;
}

Span visible_span(const Job& job, std::int64_t block, const Strip& strip) {
  const Scoring& scoring = job.problem->scoring;
  const std::int64_t first = block * job.plan->key_block;
  Span span{most(first, strip.first), least(first + job.plan->key_block, strip.last), false, false};
  if (span.lo >= span.hi) return span;
  span.hide = span.lo < strip.common_first || span.hi > strip.common_last;
  if (job.key_positions) narrow_by_positions(job, block, strip, span);
  if (scoring.key_segments && span.lo < span.hi) narrow_by_segments(job, block, strip, span);
  if (scoring.mask && span.lo < span.hi) narrow_by_mask(scoring.mask, strip, span);
  return span;
}

// --- the scores of one row ---

// From s / cap to units of ln 2: in two steps, since a large cap times log2 e may overflow.
template <class Real>
void softcap_row(Real* s, std::int64_t n, Real cap) {
  for (std::int64_t j = 0; j < n; j += lanes<Real>) store(s + j, tanh<Real>(load(s + j)) * cap * static_cast<Real>(log2_e));
}

// 0, 1, 2, ... in the lanes.
template <class Real, int... lane>
LH_INLINE Integers<Real> count_up(Lanes<lane...>) {
  return Integers<Real>{lane...};
}

// Distances are whole numbers: up to 2^24 (2^53) they are exact in the compute type, lane by lane.
template <class Real>
void alibi_row(const Job& job, const Scores<Real>& row, std::int64_t position, Real slope) {
  const auto [s, lo, n] = row;
  const std::int64_t ahead = position - job.key_start - lo * job.key_stride, exact = std::int64_t(1) << (Bits<Real>::mantissa + 1);
  const bool even = !job.key_positions && job.key_stride < exact / split_keys;  // no block is longer than a split
  if (even && ahead < exact && n * job.key_stride - ahead < exact) {
    const Real step = static_cast<Real>(job.key_stride);
    Vector<Real> distance =
        static_cast<Real>(ahead) - step * __builtin_convertvector(count_up<Real>(AllLanes<lanes<Real>>{}), Vector<Real>);
    for (std::int64_t j = 0; j < n; j += lanes<Real>, distance -= step * Real(lanes<Real>))
      store(s + j, load(s + j) - slope * larger(-distance, distance));
    return;
  }
  for (std::int64_t j = 0; j < least(n, job.problem->S - lo); ++j) {
    const std::int64_t distance = position - job.position(lo + j);
    s[j] -= slope * static_cast<Real>(distance < 0 ? -distance : distance);
  }
}

// Masks often hold the lowest finite number. Times log2 e it must not become the -inf that hides: a row of nothing else is
// uniform.
template <class Real>
LH_INLINE Vector<Real> biased(Vector<Real> s, Vector<Real> bias) {
  constexpr Real lowest = sizeof(Real) == sizeof(double) ? Real(-__DBL_MAX__) : Real(-__FLT_MAX__);
  const Vector<Real> nothing = splat(-infinity<Real>);
  return select(bias == nothing, nothing, s + larger(splat(lowest), bias * static_cast<Real>(log2_e)));
}

// n is the number of real keys. `spare` has room for a key block; what is not whole vectors in place goes through it.
template <class Real>
void bias_row(const Tensor& mask, const char* row, Real* s, std::int64_t n, Real* spare) {
  std::int64_t j = 0;
  read_in_place<Real>(mask, [&](auto reader) {
    for (; j + lanes<Real> <= n; j += lanes<Real>) store(s + j, biased<Real>(load(s + j), reader.some(row + j * reader.bytes)));
    return true;
  });
  if (j == n) return;
  const std::int64_t whole = round_up(n - j, lanes<Real>);
  widen(row + j * mask.column_stride, mask.dtype, mask.column_stride, n - j, spare);
  for (std::int64_t i = n - j; i < whole; ++i) spare[i] = 0;
  for (std::int64_t i = 0; i < whole; i += lanes<Real>) store(s + j + i, biased<Real>(load(s + j + i), load(spare + i)));
}

// Only the vectors at the edges are touched. n is whole vectors.
template <class Real>
LH_INLINE void hide_outside(Real* s, std::int64_t from, std::int64_t to, std::int64_t n) {
  using Int = typename Bits<Real>::Int;
  const Integers<Real> lane = count_up<Real>(AllLanes<lanes<Real>>{});
  const Vector<Real> nothing = splat(-infinity<Real>);
  for (std::int64_t j = 0; j < from; j += lanes<Real>)
    store(s + j, select(lane < static_cast<Int>(from - j), nothing, load(s + j)));
  for (std::int64_t j = to / lanes<Real> * lanes<Real>; j < n; j += lanes<Real>)
    store(s + j, select(lane >= static_cast<Int>(to - j), nothing, load(s + j)));
}

template <class Integer, int n>
struct Some {
  typedef Integer Vector __attribute__((vector_size(n * sizeof(Integer)), aligned(1), may_alias));
};

// Bytes as integers of a lane's size. In steps of factor two: GCC 12 converts a wider step byte by byte, which costs a
// fifth of a masked call.
template <class Real>
LH_INLINE Integers<Real> lanes_from_bytes(const char* p) {
  constexpr int n = lanes<Real>;
  using Bytes = typename Some<std::uint8_t, n>::Vector;
  using Twos = typename Some<std::int16_t, n>::Vector;
  using Fours = typename Some<std::int32_t, n>::Vector;
  const Twos twos = __builtin_convertvector(*reinterpret_cast<const Bytes*>(p), Twos);
  const Fours fours = __builtin_convertvector(twos, Fours);
  return __builtin_convertvector(fours, Integers<Real>);
}

template <class Real>
LH_INLINE void hide_by_bytes(const char* mask, std::int64_t stride, Real* s, std::int64_t n) {
  std::int64_t j = 0;
  if (stride == 1)
    for (; j + lanes<Real> <= n; j += lanes<Real>) {
      store(s + j, select(lanes_from_bytes<Real>(mask + j) != 0, load(s + j), splat(-infinity<Real>)));
    }
  for (; j < n; ++j) s[j] = mask[j * stride] ? s[j] : -infinity<Real>;
}

// Keys that no row of the strip sees are outside the span; the others are hidden by position, segment and mask.
template <class Real>
void hide_row(const Job& job, const Strip& strip, const Span& span, int r, const Scores<Real>& row, const char* mask) {
  const Problem& problem = *job.problem;
  const auto [s, lo, n] = row;
  const std::int64_t from = least(most(most(strip.begin[r], span.lo) - lo, 0), n);
  const std::int64_t to = most(least(least(strip.end[r], span.hi) - lo, n), from);
  hide_outside(s, from, to, n);
  if (job.key_positions) {
    const std::int64_t* position = job.key_positions + lo;
    for (std::int64_t j = from; j < to; ++j)
      s[j] = position[j] >= strip.low[r] && position[j] <= strip.high[r] ? s[j] : -infinity<Real>;
  }
  if (span.segments) {
    const std::int64_t* ids = problem.scoring.key_segments + strip.b * problem.S + lo;
    for (std::int64_t j = from; j < to; ++j) s[j] = ids[j] == strip.segment[r] ? s[j] : -infinity<Real>;
  }
  const std::int64_t stride = problem.scoring.mask.column_stride;
  if (mask) hide_by_bytes(mask + from * stride, stride, s + from, to - from);
}

// Prefetches the mask for keys [lo, hi). Its rows are far apart: the CPU's prefetcher does not find them. Where its
// columns are far apart, as in a transposed mask, each has a line, and what lies between is not read.
LH_INLINE void fetch_mask(const Tensor& mask, const Strip& strip, std::int64_t lo, std::int64_t hi) {
  if (!mask) return;
  const std::int64_t step = mask.column_stride > 64 ? mask.column_stride : 64;
  for (int r = 0; r < strip.rows; ++r) {
    const char* row = mask.at(strip.b, strip.head[r], strip.t[r]) + lo * mask.column_stride;
    for (std::int64_t i = 0; i < (hi - lo) * mask.column_stride; i += step) __builtin_prefetch(row + i);
  }
}

// The strip's scores in place, its rows score_stride apart. Returns whether any of them may be hidden.
template <class Real>
bool score_strip(const Job& job, const Strip& strip, const Span& span, const Scores<Real>& scores, Real* spare) {
  auto [s, lo, n] = scores;
  const Problem& problem = *job.problem;
  const Scoring& scoring = problem.scoring;
  const std::int64_t stride = job.plan->score_stride, real_keys = least(n, problem.S - lo);
  const bool bias = scoring.mask && scoring.mask.dtype != DType::boolean;
  // Panels extend beyond the span on both sides: these columns are hidden, or not keys at all.
  const bool hide = span.hide || span.lo != lo || span.hi != lo + n;
  if (!hide && !bias && !scoring.alibi && scoring.softcap <= 0) return false;
  for (int r = 0; r < strip.rows; ++r, s += stride) {
    const std::int64_t head = strip.head[r];
    const char* mask = scoring.mask ? scoring.mask.at(strip.b, head, strip.t[r]) + lo * scoring.mask.column_stride : nullptr;
    if (scoring.softcap > 0) softcap_row(s, n, static_cast<Real>(scoring.softcap));
    if (scoring.alibi) alibi_row(job, Scores<Real>{s, lo, n}, strip.position[r], static_cast<Real>(scoring.alibi[head] * log2_e));
    if (bias) bias_row(scoring.mask, mask, s, real_keys, spare);
    if (hide) hide_row(job, strip, span, r, Scores<Real>{s, lo, n}, bias ? nullptr : mask);
  }
  return hide || bias;
}

// --- dropout ---

LH_INLINE std::uint64_t splitmix64(std::uint64_t z) {
  z += 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}
LH_INLINE std::uint32_t mix32(std::uint32_t x) {  // Ellis' lowbias32
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

// Drops weights of row r as a function of (seed, b, head, position of the query, position of the key) alone.
template <class Real>
void drop_row(const Job& job, const Strip& strip, int r, const Scores<Real>& weights) {
  const Scoring& scoring = job.problem->scoring;
  const auto [p, lo, n] = weights;
  std::uint64_t row = splitmix64(scoring.seed);
  const std::int64_t parts[] = {strip.b, scoring.first_head + strip.head[r], strip.position[r]};
  for (const std::int64_t part : parts) row = splitmix64(row ^ static_cast<std::uint64_t>(part));
  const std::uint32_t low = static_cast<std::uint32_t>(row), high = static_cast<std::uint32_t>(row >> 32);
  const std::uint32_t threshold = static_cast<std::uint32_t>(scoring.dropout * 0x1p32);
  const Real kept = static_cast<Real>(1 / (1 - scoring.dropout));
  for (std::int64_t j = 0; j < n; ++j) {
    const std::uint64_t key = static_cast<std::uint64_t>(job.position(lo + j));
    const std::uint32_t x = mix32(static_cast<std::uint32_t>(key) ^ low);
    const std::uint32_t y = mix32(x ^ (high + static_cast<std::uint32_t>(key >> 32) * 0x9E3779B9u));
    p[j] = y >= threshold ? p[j] * kept : Real(0);
  }
}

}  // namespace
}  // namespace levelhead
