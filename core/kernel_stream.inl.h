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
};

// NumPy's large arrays begin 16 bytes after a cache line, so that each vector of 64 bytes lies in two of them. Where several
// rows share the keys, reading two lines for each vector is slower than memory. Such tiles read whole lines: one vector more,
// of which the first and the last count in part. Lane i then has what lane i - shift has else: the same sums, in the same order.

// How many numbers lines begin after a vector's boundary, or 0: where that differs from line to line, or reads no faster.
template <class Real, class Reader, int rows>
LH_INLINE int shift_of(const Lines& x, std::int64_t columns) {
  constexpr std::int64_t bytes = sizeof(Vector<Real>);
  if (rows == 1 || !can_load_parts<Real> || Reader::bytes != sizeof(Real) || columns % lanes<Real> != 0 || x.stride % bytes != 0) return 0;
  const auto past = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(x.data) % bytes);
  return past % Reader::bytes == 0 ? static_cast<int>(past / Reader::bytes) : 0;
}

// Vector i of `vectors` of a line at p; or, with `shifted`, of the cache lines that cover it, of which p is the first: with
// zeros where the line is not.
template <class Real, int vectors, class Reader, bool shifted>
LH_INLINE Vector<Real> vector_of(const char* p, int i, int shift) {
  if constexpr (shifted) {
    const Real* from = reinterpret_cast<const Real*>(p) + i * lanes<Real>;
    return i == 0 ? load_from(from, shift) : i == vectors ? load_until(from, shift) : load(from);
  } else {
    return Reader::some(p + i * lanes<Real> * Reader::bytes);
  }
}
template <class Real, int vectors, bool shifted>
LH_INLINE void store_vector(Real* p, int i, int shift, Vector<Real> x) {
  Real* to = p + i * lanes<Real>;
  if constexpr (shifted) {
    if (i == 0) return store_from(to, x, shift);
    if (i == vectors) return store_until(to, x, shift);
  }
  store(to, x);
}

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

// --- the register tile: long stretches of a line first, many rows second ---
//
// Line after line, in order: the CPU's prefetchers hide the latency of memory, and they follow only few streams. Reading
// four lines in parallel costs half of the bandwidth.

constexpr int vectors_at_once = 8;
constexpr int rows_at_once = tile_rows >= 12 ? 2 : 1;  // 16 of 32 registers, or 8 of 16: q here, acc there

// A line longer than the tile is read in several parts, which is out of order for memory: so it is loaded beforehand, in
// order. (A prefetch instruction instead of the load is slower.)
template <class Real, class Reader>
LH_INLINE void fetch(const Lines& x, std::int64_t n, std::int64_t columns) {
  if (columns <= vectors_at_once * lanes<Real>) return;
  for (std::int64_t j = 0; j < n; ++j)
    for (std::int64_t i = 0; i < columns * Reader::bytes; i += 64)
      static_cast<void>(*static_cast<const volatile char*>(x.data + j * x.stride + i));
}

// --- scores ---

// waiting (rows x lanes) += q (rows x vectors) . k (count x vectors), each dot product still spread over the lanes: with
// `shifted`, so many lanes further on.
template <class Real, int rows, int vectors, class Reader, bool shifted>
[[gnu::noinline]] void dots_tile(const Real* q, std::int64_t D, const Lines& k, std::int64_t count, bool begins, int shift,
                                 Vector<Real> (*waiting)[lanes<Real>]) {
  constexpr int loads = vectors + shifted;
  Vector<Real> x[rows][loads];
#pragma GCC unroll 2
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 9
    for (int i = 0; i < loads; ++i)
      x[r][i] = vector_of<Real, vectors, AsTheyAre<Real>, shifted>(reinterpret_cast<const char*>(q + r * D - shift), i, shift);
  const char* at = k.data - shift * Reader::bytes;
  for (std::int64_t j = 0; j < count; ++j, at += k.stride) {
    Vector<Real> total[rows];
#pragma GCC unroll 2
    for (int r = 0; r < rows; ++r) total[r] = begins ? Vector<Real>{} : waiting[r][j];
#pragma GCC unroll 9
    for (int i = 0; i < loads; ++i) {
      const Vector<Real> key = vector_of<Real, vectors, Reader, shifted>(at, i, shift);
#pragma GCC unroll 2
      for (int r = 0; r < rows; ++r) total[r] += x[r][i] * key;
    }
#pragma GCC unroll 2
    for (int r = 0; r < rows; ++r) waiting[r][j] = total[r];
  }
}

// The rest of lines, beyond their whole vectors.
template <class Real, int rows, class Reader>
[[gnu::noinline]] void dots_rest(const Real* q, std::int64_t D, const Lines& k, std::int64_t count, std::int64_t n, bool begins,
               Vector<Real> (*waiting)[lanes<Real>]) {
  for (std::int64_t j = 0; j < count; ++j)
    for (int r = 0; r < rows; ++r) {
      Real rest = 0;
      for (std::int64_t i = 0; i < n; ++i) rest = fused(q[r * D + i], Reader::one(k.data + j * k.stride + i * Reader::bytes), rest);
      if (begins) waiting[r][j] = Vector<Real>{};
      waiting[r][j][0] += rest;
    }
}

template <class Real, int rows, int vectors, class Reader>
LH_INLINE void dots_columns(const Real* q, std::int64_t D, std::int64_t from, const Lines& k, std::int64_t count, int shift,
                            Vector<Real> (*waiting)[lanes<Real>]) {
  constexpr int width = vectors * lanes<Real>;
  const auto tile = shift > 0 ? dots_tile<Real, rows, vectors, Reader, can_load_parts<Real>> : dots_tile<Real, rows, vectors, Reader, false>;
  for (; from + width <= D; from += width)
    tile(q + from, D, {k.data + from * Reader::bytes, k.stride}, count, from == 0, shift, waiting);
  if constexpr (vectors > 1)
    dots_columns<Real, rows, vectors / 2, Reader>(q, D, from, k, count, shift, waiting);
  else if (from < D)
    dots_rest<Real, rows, Reader>(q + from, D, {k.data + from * Reader::bytes, k.stride}, count, D - from, from == 0, waiting);
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

// Scores of up to `lanes` keys, from row r on (there is room for all of them behind s): the keys stay in L1 while the rows
// pass over them.
template <class Real, int tile, class Reader>
LH_INLINE void dots_rows(std::int64_t r, const LineScores<Real>& scores, const Lines& k, std::int64_t count) {
  const auto [q, rows, D, scale, s, stride] = scores;
  Vector<Real> waiting[tile][lanes<Real>];
  const int shift = shift_of<Real, Reader, tile>(k, D);
  for (; r + tile <= rows; r += tile) {
    if (count < lanes<Real> || D == 0)  // not initialised by a tile
      for (int i = 0; i < tile * lanes<Real>; ++i) waiting[i / lanes<Real>][i % lanes<Real>] = Vector<Real>{};
    dots_columns<Real, tile, vectors_at_once, Reader>(q + r * D, D, 0, k, count, shift, waiting);
    if constexpr (can_load_parts<Real>)
      for (int i = 0; shift > 0 && i < tile * lanes<Real>; ++i) {
        Vector<Real>& x = waiting[i / lanes<Real>][i % lanes<Real>];
        x = rotated(x, shift);
      }
    for (int i = 0; i < tile; ++i) store(s + (r + i) * stride, join<Real, lanes<Real>, 1>(waiting[i]) * scale[r + i]);
  }
  if constexpr (tile > 1) dots_rows<Real, tile / 2, Reader>(r, scores, k, count);
}

template <class Real, class Reader>
void score_lines(LineScores<Real> scores, const Lines& k, std::int64_t n) {
  for (std::int64_t j = 0; j < n; j += lanes<Real>, scores.s += lanes<Real>) {
    const Lines here{k.data + j * k.stride, k.stride};
    const std::int64_t count = least(lanes<Real>, n - j);
    fetch<Real, Reader>(here, count, scores.D);
    dots_rows<Real, rows_at_once, Reader>(0, scores, here, count);
  }
}

// Scores of some keys. `spare` has room for `lanes` keys.
template <class Real>
void stream_keys(const Job& job, const HeadRows& keys, const LineScores<Real>& scores, Real* spare) {
  const std::int64_t D = scores.D, n = keys.count;
  const Tensor& k = job.problem->k;
  const bool cosine = job.problem->scoring.cosine;
  if (!cosine && read_in_place<Real>(k, [&](auto reader) {
        score_lines<Real, decltype(reader)>(scores, {k.at(keys.b, keys.head, keys.first), k.row_stride}, n);
        return true;
      }))
    return;
  const Lines copies{reinterpret_cast<const char*>(spare), D * static_cast<std::int64_t>(sizeof(Real))};
  for (std::int64_t j = 0; j < n; j += lanes<Real>) {
    const std::int64_t count = least(lanes<Real>, n - j);
    for (std::int64_t i = 0; i < count; ++i) read_vector(k, keys.b, keys.head, keys.first + j + i, D, cosine, spare + i * D);
    LineScores<Real> here = scores;
    here.s += j;
    score_lines<Real, AsTheyAre<Real>>(here, copies, count);
  }
}

// --- values ---

constexpr std::int64_t resident_keys = 8 * rows_at_once;  // whose values stay in L1 while all rows and columns pass

// part (rows x vectors) += p (rows x n) . v (n x vectors).
template <class Real, int rows, int vectors, class Reader, bool shifted>
[[gnu::noinline]] void lines_tile(const Real* p, std::int64_t stride, const Lines& v, std::int64_t n, int shift, Real* part,
                                  std::int64_t part_stride) {
  constexpr int loads = vectors + shifted;
  part -= shift;
  Vector<Real> sum[rows][loads];
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 9
    for (int i = 0; i < loads; ++i)
      sum[r][i] = vector_of<Real, vectors, AsTheyAre<Real>, shifted>(reinterpret_cast<const char*>(part + r * part_stride), i, shift);
  const char* at = v.data - shift * Reader::bytes;
  for (std::int64_t j = 0; j < n; ++j, at += v.stride) {
#pragma GCC unroll 9
    for (int i = 0; i < loads; ++i) {
      const Vector<Real> value = vector_of<Real, vectors, Reader, shifted>(at, i, shift);
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) sum[r][i] += p[r * stride + j] * value;
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 9
    for (int i = 0; i < loads; ++i) store_vector<Real, vectors, shifted>(part + r * part_stride, i, shift, sum[r][i]);
}

// The same for any number of vectors: as many at once as there are registers for, the rest in smaller tiles.
template <class Real, int rows, int vectors, class Reader>
LH_INLINE void lines_columns(const Real* p, std::int64_t stride, Lines v, std::int64_t n, std::int64_t left, Real* part,
                             std::int64_t part_stride) {
  const int shift = shift_of<Real, Reader, rows>(v, left * lanes<Real>);
  const auto tile = shift > 0 ? lines_tile<Real, rows, vectors, Reader, can_load_parts<Real>> : lines_tile<Real, rows, vectors, Reader, false>;
  for (; left >= vectors; left -= vectors, part += vectors * lanes<Real>, v.data += vectors * lanes<Real> * Reader::bytes)
    tile(p, stride, v, n, shift, part, part_stride);
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
    lines_columns<Real, tile, vectors_at_once, Reader>(p + r * stride, stride, v, n, vectors, part + r * part_stride, part_stride);
  if constexpr (tile > 1) lines_rows<Real, tile / 2, Reader>(r, weights, v, n, vectors);
}

// part = p . v; whether some row came out finite. No row is finite when a value is not: zero times it is NaN.
template <class Real, class Reader>
bool weigh_lines(LineWeights<Real> weights, const Lines& v, std::int64_t n, std::int64_t vectors) {
  const std::int64_t rows = weights.rows, part_stride = weights.part_stride;
  Real* part = weights.part;
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t i = 0; i < vectors * lanes<Real>; ++i) part[r * part_stride + i] = 0;
  for (std::int64_t j = 0; j < n; j += resident_keys, weights.p += resident_keys) {
    const Lines here{v.data + j * v.stride, v.stride};
    const std::int64_t count = least(resident_keys, n - j);
    fetch<Real, Reader>(here, count, vectors * lanes<Real>);
    lines_rows<Real, rows_at_once, Reader>(0, weights, here, count, vectors);
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
  bool clean = true;
  for (std::int64_t j = 0, end; j < keys.count; j = end) {
    end = least(keys.count, (lo - first + j) / value_chunk * value_chunk + value_chunk - (lo - first));
    LineWeights<Real> here = weights;
    here.p += j;
    const bool done = plan.E % lanes<Real> == 0 && read_in_place<Real>(v, [&](auto reader) {
      return weigh_lines<Real, decltype(reader)>(here, {v.at(keys.b, keys.head, lo + j), v.row_stride}, end - j, whole);
    });
    if (!done) {
      clean = copy_values(job, {keys.b, keys.head, lo + j, end - j}, room) && clean;
      const Lines copies{reinterpret_cast<const char*>(room), columns * static_cast<std::int64_t>(sizeof(Real))};
      weigh_lines<Real, AsTheyAre<Real>>(here, copies, end - j, columns / lanes<Real>);
    }
    for (std::int64_t r = 0; r < weights.rows; ++r)
      for (std::int64_t c = 0; c < plan.E; ++c) {
        Real& to = acc[r * columns + c];
        to = fused(to, j == 0 ? share[r] : Real(1), weights.part[r * columns + c]);
      }
  }
  return clean;
}

}  // namespace
}  // namespace levelhead
