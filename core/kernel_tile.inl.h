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

// s (rows x panel) = scale * q (D x rows, interleaved) . k (D x panel)
template <class Real>
LH_INLINE void score_tile(const Real* q, const Real* k, std::int64_t D, const Real* scale, Real* s,
                          std::int64_t stride) {
  Vector<Real> left[tile_rows] = {}, right[tile_rows] = {};
  for (std::int64_t d = 0; d < D; ++d) {
    const Vector<Real> k_left = load(k), k_right = load(k + lanes<Real>);
#pragma GCC unroll 16
    for (int r = 0; r < tile_rows; ++r) {
      left[r] += q[r] * k_left;
      right[r] += q[r] * k_right;
    }
    q += tile_rows;
    k += panel<Real>;
  }
#pragma GCC unroll 16
  for (int r = 0; r < tile_rows; ++r) {
    store(s + r * stride, left[r] * scale[r]);
    store(s + r * stride + lanes<Real>, right[r] * scale[r]);
  }
}

// acc (rows x panel) = share * acc + p (rows x n) . v (n x panel). The rescaling by `share`, due when a row's
// maximum moved, rides on the load.
template <class Real>
LH_INLINE void value_tile(const Real* p, std::int64_t stride, const Real* v, std::int64_t n, const Real* share,
                          Real* acc, std::int64_t acc_stride) {
  Vector<Real> left[tile_rows], right[tile_rows];
#pragma GCC unroll 16
  for (int r = 0; r < tile_rows; ++r) {
    left[r] = load(acc + r * acc_stride) * share[r];
    right[r] = load(acc + r * acc_stride + lanes<Real>) * share[r];
  }
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
    store(acc + r * acc_stride, left[r]);
    store(acc + r * acc_stride + lanes<Real>, right[r]);
  }
}

}  // namespace
}  // namespace levelhead
