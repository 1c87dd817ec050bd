// The two register tiles: scores = Q Kᵀ and acc += P V, a strip of query rows by one or two vectors at a time.
//
// All accumulators live in registers (12 of 16 on AVX2, 24 of 32 on AVX-512); each step loads two vectors
// of a panel and broadcasts one number per row. Strips that are not full, and panels that are half full or less,
// take a smaller tile: a row's bits are the same in all of them. Part of kernel.inl.h.
#pragma once

#include "kernel_operand.inl.h"

namespace levelhead {
namespace {

constexpr int tile_rows = LEVELHEAD_TILE_ROWS;
template <class Real>
constexpr int panel = 2 * lanes<Real>;

// The rows of the smallest tile for this number of rows.
LH_INLINE int rows_of_tile(std::int64_t rows) {
  constexpr int third = tile_rows / 3;
  return rows <= third ? third : rows <= 2 * third ? 2 * third : tile_rows;
}
// Calls work(n) with that number of rows as a type.
template <int n>
struct Count {
  static constexpr int value = n;
};
template <class Work>
LH_INLINE void with_tile(std::int64_t rows, const Work& work) {
  constexpr int third = tile_rows / 3;
  if (rows <= third)
    work(Count<third>{});
  else if (rows <= 2 * third)
    work(Count<2 * third>{});
  else
    work(Count<tile_rows>{});
}

// A long sum is computed in pieces (for scores: Plan::score_chunk): here of the values of so many keys. No measurable cost
// (docs/kernel.md).
constexpr std::int64_t value_chunk = 256;

// The operands of a tile of scores, and where they go.
template <class Real>
struct ScoreProduct {
  const Real* q;  // rows of D words, q_step apart
  std::int64_t q_step;
  const Real* k;  // a panel, D x panel
  std::int64_t D, chunk;  // words of a query or key; how many of them are summed in one go
  const Real* scale;      // of each row
  Real* s;                // rows `stride` apart
  std::int64_t stride;
};

// Sums that registers hold at once; the rest is for a key's vectors and a query's number.
constexpr int sums_at_once = 2 * tile_rows;

// s (rows x vectors) = scale * q . k, a key's two halves side by side: no half has to be stored and read again.
template <class Operand, int rows, int vectors, class Real = typename Operand::Real>
LH_INLINE void score_halves(const ScoreProduct<Real>& product) {
  const auto [q, q_step, k, D, half, scale, s, stride] = product;
  Vector<Real> low[rows][vectors] = {}, high[rows][vectors] = {};
  const auto add = [&](std::int64_t d, auto& sum) {
    Vector<Real> key[vectors];
#pragma GCC unroll 2
    for (int i = 0; i < vectors; ++i) key[i] = load(k + d * panel<Real> + i * lanes<Real>);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 2
      for (int i = 0; i < vectors; ++i) sum[r][i] = Operand::add_product(sum[r][i], number(q + r * q_step + d), key[i]);
  };
  for (std::int64_t d = 0; d < D - half; ++d) {
    add(d, low);
    add(half + d, high);
  }
  if (2 * half > D) add(half - 1, low);
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 2
    for (int i = 0; i < vectors; ++i) store(s + r * stride + i * lanes<Real>, (high[r][i] + low[r][i]) * scale[r]);
}

// The same with sums over any number of pieces, one after another.
template <class Operand, int rows, int vectors, class Real = typename Operand::Real>
LH_INLINE void score_pieces(const ScoreProduct<Real>& product) {
  // Copies, since a store to s might else change them as far as the compiler knows.
  const auto [q, q_step, k, D, chunk_given, scale, s, stride] = product;
  // In pairs a sum has half the terms, and rounding to bfloat16 costs far more accuracy. Makes the trip count of the
  // outer loop a compile-time constant, which is worth 4 % of the whole at d 64.
  const std::int64_t chunk = Operand::per_word > 1 ? D : chunk_given;
  for (std::int64_t first = 0, end;; first = end) {
    end = first + chunk < D ? first + chunk : D;
    Vector<Real> sum[rows][vectors] = {};
    for (std::int64_t d = first; d < end; ++d) {
      Vector<Real> key[vectors];
#pragma GCC unroll 2
      for (int i = 0; i < vectors; ++i) key[i] = load(k + d * panel<Real> + i * lanes<Real>);
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r)
#pragma GCC unroll 2
        for (int i = 0; i < vectors; ++i) sum[r][i] = Operand::add_product(sum[r][i], number(q + r * q_step + d), key[i]);
    }
    const bool last = end == D;
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 2
      for (int i = 0; i < vectors; ++i) {
        Real* to = s + r * stride + i * lanes<Real>;
        if (first > 0) sum[r][i] += load(to);
        store(to, last ? sum[r][i] * scale[r] : sum[r][i]);
      }
    if (last) return;
  }
}

template <class Operand, int rows, int vectors, class Real = typename Operand::Real>
[[gnu::noinline]] void score_tile(const ScoreProduct<Real>& product) {
  constexpr int together = 2 * rows * vectors <= sums_at_once ? rows : rows / 2;
  if constexpr (Operand::per_word == 1 && tile_rows >= 12 && together * 2 >= rows)
    if (product.chunk < product.D && product.D <= 2 * product.chunk) {
      ScoreProduct<Real> part = product;
      for (int r = 0; r < rows; r += together) {
        score_halves<Operand, together, vectors>(part);
        part.q += together * part.q_step;
        part.s += together * part.stride;
        part.scale += together;
      }
      return;
    }
  score_pieces<Operand, rows, vectors>(product);
}

// Where a product with values goes. share * acc is added when part of the sum is there already (which includes the
// rescaling when a row's maximum has changed), and the whole is divided by `below` at the end (a product with 1 / below
// would be a third less exact over few keys).
template <class Real>
struct Target {
  const Real* share;   // or null: acc holds nothing yet
  const Real* below;   // or null: more is to come
  const Real* acc;
  std::int64_t acc_step;  // between rows
  Real* to;
  std::int64_t step;
};

// p (rows x n words) . v (n x vectors, rows v_step apart). With `turned`, p is n x rows: a gradient sums over queries,
// which are the rows of the scores.
template <class Operand, int rows, int vectors, bool turned = false, class Real = typename Operand::Real>
[[gnu::noinline]] void value_tile(const Real* p, std::int64_t stride, const Real* v, std::int64_t v_step,
                                  std::int64_t n, const Target<Real>& target) {
  Vector<Real> sum[rows][vectors] = {};
  for (std::int64_t j = 0; j < n; ++j, v += v_step) {
    Vector<Real> value[vectors];
#pragma GCC unroll 2
    for (int i = 0; i < vectors; ++i) value[i] = load(v + i * lanes<Real>);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 2
      for (int i = 0; i < vectors; ++i)
        sum[r][i] = Operand::add_product(sum[r][i], p[turned ? j * stride + r : r * stride + j], value[i]);
  }
  if (target.share) {
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 2
      for (int i = 0; i < vectors; ++i) sum[r][i] += load(target.acc + r * target.acc_step + i * lanes<Real>) * target.share[r];
  }
  if (target.below) {
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 2
      for (int i = 0; i < vectors; ++i) sum[r][i] = sum[r][i] / target.below[r];
  }
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 2
    for (int i = 0; i < vectors; ++i) store(target.to + r * target.step + i * lanes<Real>, sum[r][i]);
}

}  // namespace
}  // namespace levelhead
