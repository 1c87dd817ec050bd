// The two register tiles: scores = Q Kᵀ and acc += P V, a strip of query rows by two vectors at a time.
//
// All accumulators live in registers (12 of 16 on AVX2, 24 of 32 on AVX-512); each step loads two vectors
// of the packed panel and broadcasts one number per row. Strips that are two thirds full or less, and panels that
// are half full or less, take a smaller tile. Part of kernel.inl.h.
#pragma once

#include "simd.h"

namespace levelhead {
namespace {

constexpr int tile_rows = LEVELHEAD_TILE_ROWS, few_rows = tile_rows * 2 / 3;
template <class Real>
constexpr int panel = 2 * lanes<Real>;

// A long sum is taken in pieces: n terms in pieces of b have a rounding error of about sqrt(b / n + 1 / b) of that
// in one go. Shorter pieces cost more loads and stores; these cost less than one can measure.
constexpr std::int64_t value_chunk = 256;                                                 // keys
LH_INLINE std::int64_t score_chunk(std::int64_t D) { return D <= 16 ? D : (D + 1) / 2; }  // numbers of a key

// s (rows x vectors) = scale * q (rows x D) . k (D x panel). Rows of q are D apart.
template <class Real, int rows, int vectors>
[[gnu::noinline]] void score_tile(const Real* q, const Real* k, std::int64_t D, const Real* scale, Real* s,
                                  std::int64_t stride) {
  const std::int64_t chunk = score_chunk(D);
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
        for (int i = 0; i < vectors; ++i) sum[r][i] += q[r * D + d] * key[i];
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

// acc (rows x panel) = share * acc + p (rows x n) . v (n x panel). The rescaling by `share`, due
// when a row's maximum moved, rides on the joining.
template <class Real, int rows>
[[gnu::noinline]] void value_tile(const Real* p, std::int64_t stride, const Real* v, std::int64_t n, const Real* share,
                                  Real* acc, std::int64_t acc_stride) {
  Vector<Real> left[rows] = {}, right[rows] = {};
  for (std::int64_t j = 0; j < n; ++j) {
    const Vector<Real> v_left = load(v), v_right = load(v + lanes<Real>);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      const Real weight = p[r * stride + j];
      left[r] += weight * v_left;
      right[r] += weight * v_right;
    }
    v += panel<Real>;
  }
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) {
    Real* to = acc + r * acc_stride;
    store(to, load(to) * share[r] + left[r]);
    store(to + lanes<Real>, load(to + lanes<Real>) * share[r] + right[r]);
  }
}

}  // namespace
}  // namespace levelhead
