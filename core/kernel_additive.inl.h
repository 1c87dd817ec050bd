// Additive attention (Bahdanau 2014): s = sum over a of w_a tanh(q_a + k_a) instead of the dot product. The code
// after a score is the same. Part of kernel.inl.h.
//
// q and k arrive projected and times 2 log2 e: 1 - tanh(x + y) = 2 / (1 + 2^(q + k)). The
// absolute error is 1e-7, the precision of a score, and there is one division, where tanh itself takes two.
#pragma once

#include "kernel_math.inl.h"
#include "kernel_tile.inl.h"

namespace levelhead {
namespace {

// 1 - tanh(x + y). Beyond the clamp it is 0 or 2 to the last bit; a NaN passes.
template <class Real>
LH_INLINE Vector<Real> one_minus_tanh(Real q, Vector<Real> k) {
  constexpr Real far = Bits<Real>::bias - 1;
  const Vector<Real> x = larger(splat(-far), smaller(splat(far), q + k));
  return Real(2) / (Real(1) + exp2_flushed<Real>(x));
}

template <class Real, int rows, int vectors>
[[gnu::noinline]] void additive_tile(const ScoreProduct<Real>& product, const Real* weights) {
  const auto [q, q_step, k, A, chunk, scale, s, stride] = product;
  Vector<Real> sum[rows][vectors] = {};
  Real total = 0;
  for (std::int64_t a = 0; a < A; ++a) {
    Vector<Real> key[vectors];
#pragma GCC unroll 2
    for (int i = 0; i < vectors; ++i) key[i] = load(k + a * panel<Real> + i * lanes<Real>);
    total += weights[a];
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 2
      for (int i = 0; i < vectors; ++i)
        sum[r][i] += weights[a] * one_minus_tanh<Real>(number(q + r * q_step + a), key[i]);
  }
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 2
    for (int i = 0; i < vectors; ++i) store(s + r * stride + i * lanes<Real>, (total - sum[r][i]) * scale[r]);
}

// Scores of a tile: additive, or dot products.
template <class Operand, int rows, int vectors, class Real = typename Operand::Real>
LH_INLINE void any_score_tile(const Scoring& scoring, const ScoreProduct<Real>& product) {
  if constexpr (Operand::per_word == 1) {
    if (const Real* weights = static_cast<const Real*>(scoring.additive))
      return additive_tile<Real, rows, vectors>(product, weights);
  }
  score_tile<Operand, rows, vectors>(product);
}

// The operands of a strip's gradients, columns [lo, hi) of a key block, and the sums they are added to.
template <class Real>
struct AdditiveGradient {
  std::int64_t rows, A;
  const Real *q, *keys, *weights;  // queries A apart; keys packed
  const Real* ds;
  std::int64_t stride, lo, hi;  // stride: between rows of ds
  Real* dq;
  std::int64_t wide;  // between rows of dq
  Real *dk, *dw;      // dk as the keys are packed, the weights yet to be multiplied in
};

// Gradients of a strip by the projected q and k, and by the weights, from ds. Where ds is zero nothing is added: hidden
// keys may hold anything.
template <class Real>
[[gnu::noinline]] void additive_gradient(const AdditiveGradient<Real>& product) {
  const auto [rows, A, q, keys, weights, ds, stride, lo, hi, dq, wide, dk, dw] = product;
  const Vector<Real> zero{};
  for (std::int64_t a = 0; a < A; ++a) {
    Vector<Real> across[tile_rows] = {}, by_weight = {};
    for (std::int64_t j = lo; j < hi; j += lanes<Real>) {
      const std::int64_t at = j / panel<Real> * panel<Real> * A + a * panel<Real> + j % panel<Real>;
      const Vector<Real> key = load(keys + at);
      Vector<Real> along = {};
      for (std::int64_t r = 0; r < rows; ++r) {
        const Vector<Real> d = load(ds + r * stride + j), u = one_minus_tanh<Real>(q[r * A + a], key);
        const Vector<Real> part = select(d != zero, d * u * (Real(2) - u), zero);
        across[r] += part;
        along += part;
        by_weight += select(d != zero, d * (Real(1) - u), zero);
      }
      store(dk + at, load(dk + at) + along);
    }
    for (std::int64_t r = 0; r < rows; ++r) dq[r * wide + a] += weights[a] * sum<Real>(across[r]);
    dw[a] += sum<Real>(by_weight);
  }
}

}  // namespace
}  // namespace levelhead
