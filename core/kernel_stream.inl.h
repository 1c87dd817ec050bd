// For very few queries (decoding): keys and values are read once, in place, at the speed of memory.
// Nothing is transposed; a score is a dot product along the key. Half types are widened in registers.
// Not for many rows: each score costs a sum across lanes, which packing saves. Part of kernel.inl.h.
#pragma once

#include "kernel_pack.inl.h"

namespace levelhead {
namespace {

// --- lines ---

// Rows of numbers, `stride` bytes apart.
struct Lines {
  const char* data;
  std::int64_t stride;

  LH_INLINE Lines from(std::int64_t j) const { return {data + j * stride, stride}; }
};

// --- sums across the lanes of many vectors at once ---

constexpr int part_bytes = 16;  // within these and between these, shuffles are cheap on every CPU

// Neighbours of both vectors added up: a's in the lower half of the result, b's in the upper half. Without `large`
// the neighbours are lanes and the halves those of each part; with it the neighbours are parts.
template <class Real, bool large, int... lane>
LH_INLINE Vector<Real> add_neighbours(Vector<Real> a, Vector<Real> b, Lanes<lane...>) {
  constexpr int n = lanes<Real>, part = part_bytes / static_cast<int>(sizeof(Real));
  constexpr int unit = large ? part : 1, field = large ? n : part;  // what is added to its neighbour, and within what
  constexpr auto even = [](int l) {
    const int place = l % field / unit, half = field / unit / 2;
    return (place < half ? 0 : n) + l / field * field + place % half * 2 * unit + l % unit;
  };
  return __builtin_shufflevector(a, b, even(lane)...) + __builtin_shufflevector(a, b, (even(lane) + unit)...);
}

// Joins x[0 .. count) into x[0], so that lane i holds the sum of x[i] when `count` is all lanes in the
// end. `done` have been joined into each before. 15 times two shuffles give 16 sums, of which each alone takes 4.
template <class Real, int count, int done>
LH_INLINE Vector<Real> join(Vector<Real>* x) {
  if constexpr (count == 1) {
    return x[0];
  } else {
    constexpr bool large = done >= part_bytes / static_cast<int>(sizeof(Real));
#pragma GCC unroll 8
    for (int i = 0; i < count / 2; ++i)
      x[i] = add_neighbours<Real, large>(x[2 * i], x[2 * i + 1], AllLanes<lanes<Real>>{});
    return join<Real, count / 2, done * 2>(x);
  }
}

// --- the way through memory ---
//
// It is read in order and without a pause: while some lines are computed, those that follow are prefetched, after the last
// key the first values, after the last value the next keys. The CPU's own prefetcher begins anew each time, and it
// follows only few lines in parallel.

constexpr std::int64_t line_bytes = 64;
constexpr int into_l2 = 2;  // prefetched into L1 the lines would take the few places of loads that wait
constexpr std::int64_t resident_bytes = 8 * 1024;  // of lines that stay in L1 while all rows and columns pass
constexpr std::int64_t ahead_bytes = 8 * 1024;     // how far ahead memory is read

struct Route {
  Lines now;
  std::int64_t n, bytes;  // how many lines, and of each
  Lines then;             // what is read next

  // Prefetches what will be computed a while after lines [j, j + count).
  LH_INLINE void fetch(std::int64_t j, std::int64_t count) const {
    j += ahead_bytes / most(bytes, 1);
    const Lines ahead = j < n ? now.from(j) : then.from(j - n);
    if (!ahead.data) return;
    for (std::int64_t i = 0; i < count; ++i)
      for (std::int64_t at = 0; at < bytes; at += line_bytes) __builtin_prefetch(ahead.data + i * ahead.stride + at, 0, into_l2);
  }
};

// --- the register tile: several rows by several lines, or by several vectors of one ---

constexpr int rows_at_once = tile_rows >= 12 ? 4 : 2;
constexpr int sums_at_once = 4 * rows_at_once;  // of 32 or 16 registers
template <class Real>
constexpr int lines_at_once = lanes<Real> < 4 ? lanes<Real> : 4;
template <int rows>
constexpr int vectors_at_once = sums_at_once / rows < 8 ? sums_at_once / rows : 8;

// --- scores ---

// The product beyond the whole vectors of a line.
template <class Real, class Reader>
[[gnu::noinline]] Real dots_rest(const Real* q, const char* k, std::int64_t n) {
  Real rest = 0;
  for (std::int64_t i = 0; i < n; ++i) rest = fused(q[i], Reader::one(k + i * Reader::bytes), rest);
  return rest;
}

// q (rows x D) . k (lines x D), those of a row joined into one vector. The lines after the last of `count` repeat it.
template <class Real, int rows, class Reader>
[[gnu::noinline]] void dots_tile(const Real* q, std::int64_t D, const Lines& k, std::int64_t count, Vector<Real>* joined,
                                 std::int64_t step) {
  constexpr int lines = lines_at_once<Real>;
  const char* at[lines];
  for (int j = 0; j < lines; ++j) at[j] = k.data + least(j, count - 1) * k.stride;
  Vector<Real> total[rows][lines] = {};
  std::int64_t d = 0;
  for (; d + lanes<Real> <= D; d += lanes<Real>) {
    Vector<Real> x[rows];
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) x[r] = load(q + r * D + d);
#pragma GCC unroll 4
    for (int j = 0; j < lines; ++j) {
      const Vector<Real> key = Reader::some(at[j] + d * Reader::bytes);
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) total[r][j] += x[r] * key;
    }
  }
  if (d < D) {
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < lines; ++j) total[r][j][0] += dots_rest<Real, Reader>(q + r * D + d, at[j] + d * Reader::bytes, D - d);
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) joined[r * step] = join<Real, lines, 1>(total[r]);
}

// Queries, D apart, and where their scores go.
template <class Real>
struct LineScores {
  const Real* q;
  std::int64_t rows, D;
  const Real* scale;  // of each row
  Real* s;            // rows `stride` apart
  std::int64_t stride;
};

// Scores of up to `lanes` keys, from row r on (there is room for all of them behind s).
template <class Real, int tile, class Reader>
LH_INLINE void dots_rows(std::int64_t r, const LineScores<Real>& scores, const Route& route, std::int64_t first, std::int64_t count) {
  constexpr int lines = lines_at_once<Real>, tiles = lanes<Real> / lines;
  const auto [q, rows, D, scale, s, stride] = scores;
  for (; r + tile <= rows; r += tile) {
    Vector<Real> joined[tile][tiles] = {};
    for (std::int64_t j = 0; j < count; j += lines) {
      if (r == 0) route.fetch(first + j, lines);
      dots_tile<Real, tile, Reader>(q + r * D, D, route.now.from(first + j), count - j, &joined[0][j / lines], tiles);
    }
    for (int i = 0; i < tile; ++i) store(s + (r + i) * stride, join<Real, tiles, lines>(joined[i]) * scale[r + i]);
  }
  if constexpr (tile > 1) dots_rows<Real, tile / 2, Reader>(r, scores, route, first, count);
}

template <class Real, class Reader>
void score_lines(LineScores<Real> scores, const Route& route) {
  for (std::int64_t j = 0; j < route.n; j += lanes<Real>, scores.s += lanes<Real>)
    dots_rows<Real, rows_at_once, Reader>(0, scores, route, j, least(lanes<Real>, route.n - j));
}

// Where the lines of some rows begin, of an array that may be absent.
LH_INLINE Lines lines_of(const Tensor& x, const HeadRows& rows) {
  if (!x) return {nullptr, 0};
  return {x.at(rows.b, rows.head, rows.first), x.row_stride};
}

// Scores of some keys. `spare` has room for `lanes` keys.
template <class Real>
void stream_keys(const Job& job, const HeadRows& keys, const LineScores<Real>& scores, Real* spare) {
  const std::int64_t D = scores.D, n = keys.count;
  const Tensor& k = job.problem->k;
  const bool cosine = job.problem->scoring.cosine;
  if (!cosine && read_in_place<Real>(k, [&](auto reader) {
        using Reader = decltype(reader);
        score_lines<Real, Reader>(scores, {lines_of(k, keys), n, D * Reader::bytes, lines_of(job.problem->v, keys)});
        return true;
      }))
    return;
  constexpr std::int64_t bytes = sizeof(Real);
  const Lines copies{reinterpret_cast<const char*>(spare), D * bytes};
  for (std::int64_t j = 0; j < n; j += lanes<Real>) {
    const std::int64_t count = least(lanes<Real>, n - j);
    for (std::int64_t i = 0; i < count; ++i) read_vector(k, keys.b, keys.head, keys.first + j + i, D, cosine, spare + i * D);
    LineScores<Real> here = scores;
    here.s += j;
    score_lines<Real, AsTheyAre<Real>>(here, {copies, count, D * bytes, {}});
  }
}

// --- values ---

// part (rows x vectors) += p (rows x n) . v (n x vectors).
template <class Real, int rows, int vectors, class Reader>
[[gnu::noinline]] void lines_tile(const Real* p, std::int64_t stride, const Lines& v, std::int64_t n, Real* part,
                                  std::int64_t part_stride) {
  Vector<Real> sum[rows][vectors];
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
    for (int i = 0; i < vectors; ++i) sum[r][i] = load(part + r * part_stride + i * lanes<Real>);
  const char* at = v.data;
  for (std::int64_t j = 0; j < n; ++j, at += v.stride) {
#pragma GCC unroll 8
    for (int i = 0; i < vectors; ++i) {
      const Vector<Real> value = Reader::some(at + i * lanes<Real> * Reader::bytes);
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) sum[r][i] += p[r * stride + j] * value;
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
    for (int i = 0; i < vectors; ++i) store(part + r * part_stride + i * lanes<Real>, sum[r][i]);
}

// The same for any number of vectors: as many at once as there are registers for, the rest in smaller tiles.
template <class Real, int rows, int vectors, class Reader>
LH_INLINE void lines_columns(const Real* p, std::int64_t stride, Lines v, std::int64_t n, std::int64_t left, Real* part,
                             std::int64_t part_stride) {
  for (; left >= vectors; left -= vectors, part += vectors * lanes<Real>, v.data += vectors * lanes<Real> * Reader::bytes)
    lines_tile<Real, rows, vectors, Reader>(p, stride, v, n, part, part_stride);
  if constexpr (vectors > 1) lines_columns<Real, rows, vectors / 2, Reader>(p, stride, v, n, left, part, part_stride);
}

// Weights, and where their products with values go.
template <class Real>
struct LineWeights {
  const Real* p;  // rows `stride` apart
  std::int64_t rows, stride;
  Real* part;
  std::int64_t part_stride;
};

template <class Real, int tile, class Reader>
LH_INLINE void lines_rows(std::int64_t r, const LineWeights<Real>& weights, const Lines& v, std::int64_t n, std::int64_t vectors) {
  const auto [p, rows, stride, part, part_stride] = weights;
  for (; r + tile <= rows; r += tile)
    lines_columns<Real, tile, vectors_at_once<tile>, Reader>(p + r * stride, stride, v, n, vectors, part + r * part_stride, part_stride);
  if constexpr (tile > 1) lines_rows<Real, tile / 2, Reader>(r, weights, v, n, vectors);
}

// part = p . v for lines [first, end) of the route; whether some row came out finite. No row is finite when a value is not:
// zero times it is NaN.
template <class Real, class Reader>
bool weigh_lines(LineWeights<Real> weights, const Route& route, std::int64_t first, std::int64_t end, std::int64_t vectors) {
  const std::int64_t rows = weights.rows, part_stride = weights.part_stride;
  const std::int64_t resident = most(resident_bytes / most(route.bytes, 1), 4);
  Real* part = weights.part;
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t i = 0; i < vectors * lanes<Real>; ++i) part[r * part_stride + i] = 0;
  for (std::int64_t j = first; j < end; j += resident, weights.p += resident) {
    const std::int64_t count = least(resident, end - j);
    route.fetch(j, count);
    lines_rows<Real, rows_at_once, Reader>(0, weights, route.now.from(j), count, vectors);
  }
  for (std::int64_t r = 0; r < rows; ++r)
    if (all_finite(part + r * part_stride, vectors * lanes<Real>)) return true;
  return false;
}

// Values of some keys as the compute type, with zeros for a value that is not finite. Whether all were.
template <class Real>
bool copy_values(const Job& job, const HeadRows& keys, Real* room) {
  const Plan& plan = *job.plan;
  bool clean = true;
  for (std::int64_t j = 0; j < keys.count; ++j, room += plan.padded_columns) {
    read_vector(job.problem->v, keys.b, keys.head, keys.first + j, plan.E, false, room);
    const bool usable = all_finite(room, plan.E);
    clean = clean && usable;
    for (std::int64_t c = usable ? plan.E : 0; c < plan.padded_columns; ++c) room[c] = 0;
  }
  return clean;
}

// acc = share * acc + weights . V for some keys of the block that begins at key `first`, in pieces that begin at fixed keys
// (as in multiply_values); the weights' products have the width of acc. Values are read in place and the result is checked
// afterwards: only where it is not finite the values are copied, and those that are not finite are left to the caller.
// False when there are any. `room` has space for the copies.
template <class Real>
bool stream_values(const Job& job, std::int64_t first, const HeadRows& keys, const LineWeights<Real>& weights, const Real* share,
                   Real* room, Real* acc) {
  const Plan& plan = *job.plan;
  const Tensor& v = job.problem->v;
  const std::int64_t columns = plan.padded_columns, whole = plan.E / lanes<Real>, lo = keys.first;
  const HeadRows next{keys.b, keys.head, lo + keys.count, 0};
  bool clean = true;
  for (std::int64_t j = 0, end; j < keys.count; j = end) {
    end = least(keys.count, (lo - first + j) / value_chunk * value_chunk + value_chunk - (lo - first));
    LineWeights<Real> here = weights;
    here.p += j;
    const bool done = plan.E % lanes<Real> == 0 && read_in_place<Real>(v, [&](auto reader) {
      using Reader = decltype(reader);
      const Route route{lines_of(v, keys), keys.count, plan.E * Reader::bytes, lines_of(job.problem->k, next)};
      return weigh_lines<Real, Reader>(here, route, j, end, whole);
    });
    if (!done) {
      clean = copy_values(job, {keys.b, keys.head, lo + j, end - j}, room) && clean;
      const std::int64_t bytes = columns * static_cast<std::int64_t>(sizeof(Real));
      const Route route{{reinterpret_cast<const char*>(room), bytes}, end - j, bytes, {}};
      weigh_lines<Real, AsTheyAre<Real>>(here, route, 0, end - j, columns / lanes<Real>);
    }
    for (std::int64_t r = 0; r < weights.rows; ++r)
      for (std::int64_t c = 0; c < columns; c += lanes<Real>) {
        Real* const to = acc + r * columns + c;
        store(to, load(to) * (j == 0 ? share[r] : Real(1)) + load(weights.part + r * columns + c));
      }
  }
  return clean;
}

}  // namespace
}  // namespace levelhead
