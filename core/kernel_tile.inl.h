// The two register tiles: scores = Q Kᵀ and acc += P V, `rows` queries by two vectors at a time.
//
// All accumulators live in registers (12 of 16 on AVX2, 24 of 32 on AVX-512); each step loads two vectors
// of the packed panel and broadcasts one number per row. Part of kernel.inl.h.
#pragma once

#include "simd.h"

namespace levelhead {
namespace {

constexpr int tile_rows = LEVELHEAD_TILE_ROWS;
template <class Real>
constexpr int panel = 2 * lanes<Real>;

// A long sum is taken in pieces: n terms in pieces of b have a rounding error of about sqrt(b / n + 1 / b) of that
// in one go. Shorter pieces cost more loads and stores.
constexpr std::int64_t score_chunk = 32;   // numbers of a key; costs 2 %
constexpr std::int64_t value_chunk = 128;  // keys; costs 1 %

// s (rows x panel) = scale * q (D x rows, interleaved) . k (D x panel)
template <class Real>
LH_INLINE void score_tile(const Real* q, const Real* k, std::int64_t D, const Real* scale, Real* s,
                          std::int64_t stride) {
  for (std::int64_t first = 0, end; ; first = end) {
    end = first + score_chunk < D ? first + score_chunk : D;
    Vector<Real> left[tile_rows] = {}, right[tile_rows] = {};
    for (std::int64_t d = first; d < end; ++d) {
      const Vector<Real> k_left = load(k), k_right = load(k + lanes<Real>);
#pragma GCC unroll 16
      for (int r = 0; r < tile_rows; ++r) {
        left[r] += q[r] * k_left;
        right[r] += q[r] * k_right;
      }
      q += tile_rows;
      k += panel<Real>;
    }
    if (first > 0) {
#pragma GCC unroll 16
      for (int r = 0; r < tile_rows; ++r) {
        left[r] += load(s + r * stride);
        right[r] += load(s + r * stride + lanes<Real>);
      }
    }
    const bool last = end == D;
#pragma GCC unroll 16
    for (int r = 0; r < tile_rows; ++r) {
      store(s + r * stride, last ? left[r] * scale[r] : left[r]);
      store(s + r * stride + lanes<Real>, last ? right[r] * scale[r] : right[r]);
    }
    if (last) return;
  }
}

// acc (rows x panel) = share * acc + p (rows x n) . v (n x panel). The rescaling by `share`, due when a row's
// maximum moved, rides on the joining.
template <class Real>
LH_INLINE void value_tile(const Real* p, std::int64_t stride, const Real* v, std::int64_t n, const Real* share,
                          Real* acc, std::int64_t acc_stride) {
  Vector<Real> left[tile_rows] = {}, right[tile_rows] = {};
  for (std::int64_t j = 0; j < n; ++j) {
    const Vector<Real> v_left = load(v), v_right = load(v + lanes<Real>);
#pragma GCC unroll 16
    for (int r = 0; r < tile_rows; ++r) {
      const Real weight = p[r * stride + j];
      left[r] += weight * v_left;
      right[r] += weight * v_right;
    }
    v += panel<Real>;
  }
#pragma GCC unroll 16
  for (int r = 0; r < tile_rows; ++r) {
    Real* to = acc + r * acc_stride;
    store(to, load(to) * share[r] + left[r]);
    store(to + lanes<Real>, load(to + lanes<Real>) * share[r] + right[r]);
  }
}

}  // namespace
}  // namespace levelhead
