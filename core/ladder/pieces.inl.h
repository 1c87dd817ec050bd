// The parts of the steps: scores, softmax and values of a few queries against a few keys, each in a plain and in
// a better form. Part of steps.inl.h.
#pragma once

#include "ladder.h"
#include "simd.h"

namespace levelhead::ladder {
namespace {

using Index = std::int64_t;
using Floats = Vector<float>;
constexpr Index width = lanes<float>, panel = 2 * width;

// --- scores: s (rows x n) = q (rows x d) . keys ---

// Along the key, as K lies in memory: a sum across lanes for every score.
void dot_scores(const float* q, const float* keys, Index n, Index d, float* s, Index) {
  for (Index j = 0; j < n; ++j) {
    Floats total{};
    for (Index c = 0; c < d; c += width) total += load(q + c) * load(keys + j * d + c);
    s[j] = sum<float>(total);
  }
}

// Both products have this shape: c (rows x panel) = a (rows x n) . b (n x panel), plus share * c if there is a share.
// All of c stays in registers.
template <int rows>
[[gnu::noinline]] void tile(const float* a, Index a_step, const float* b, Index b_step, Index n, const float* share,
                            float* c, Index c_step) {
  Floats left[rows] = {}, right[rows] = {};
  for (Index i = 0; i < n; ++i) {
    const Floats b_left = load(b + i * b_step), b_right = load(b + i * b_step + width);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      left[r] += a[r * a_step + i] * b_left;
      right[r] += a[r * a_step + i] * b_right;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) {
    float* to = c + r * c_step;
    store(to, share ? load(to) * share[r] + left[r] : left[r]);
    store(to + width, share ? load(to + width) * share[r] + right[r] : right[r]);
  }
}

// Across keys: `keys` is packed, panel after panel, number c of a panel's keys side by side.
template <int rows>
void tile_scores(const float* q, const float* keys, Index n, Index d, float* s, Index s_step) {
  for (Index j = 0; j < n; j += panel) tile<rows>(q, d, keys + j * d, panel, d, nullptr, s + j, s_step);
}

// --- softmax of one row: weights exp(s - m) out, m and l updated; returns the factor for acc ---

float libm_softmax(float* s, Index n, float& m, float& l) {
  const float before = m;
  for (Index j = 0; j < n; ++j) m = s[j] > m ? s[j] : m;
  const float share = __builtin_expf(before - m);
  l *= share;
  for (Index j = 0; j < n; ++j) l += s[j] = __builtin_expf(s[j] - m);
  return share;
}

// 2^x for x <= 0: 2^round(x) by its bits, the rest by the first terms of the series, whose error at |f| = 1/2 is
// 1e-7. (The core fits its polynomial instead: kernel_math.inl.h.)
LH_INLINE Floats power_of_two(Floats x) {
  constexpr float c[] = {1, 0.69314718f, 0.24022651f, 0.055504109f, 0.0096181291f, 0.0013333558f, 0.00015403530f};
  constexpr float magic = 0x1.8p23f;  // the sum with it ends in the bits of round(x)
  x = larger(splat(-126.0f), x);
  const Floats shifted = x + magic, f = x - (shifted - magic);
  Floats p = splat(c[6]);
#pragma GCC unroll 8
  for (int i = 5; i >= 0; --i) p = p * f + c[i];
  return p * (Floats)(((Integers<float>)shifted + 127) << 23);
}

// Whole vectors, scores in units of ln 2. Beyond the last key there is -inf.
float vector_softmax(float* s, Index n, float& m, float& l) {
  for (Index j = n; j % panel; ++j) s[j] = -infinity<float>;
  Floats max[2] = {splat(m), splat(m)}, total[2] = {};
  for (Index j = 0; j < n; j += panel)
    for (int half = 0; half < 2; ++half) max[half] = larger(max[half], load(s + j + half * width));
  const float before = m;
  m = largest<float>(larger(max[0], max[1]));
  for (Index j = 0; j < n; j += panel)
    for (int half = 0; half < 2; ++half) {
      const Floats weights = power_of_two(load(s + j + half * width) - m);
      store(s + j + half * width, weights);
      total[half] += weights;
    }
  const float share = __builtin_exp2f(before - m);
  l = l * share + sum<float>(total[0] + total[1]);
  return share;
}

// --- values: acc (rows x d) = share * acc + weights (rows x n) . v, whose rows lie d apart ---

// One row of acc at a time, loaded and stored for every key.
template <int rows>
void row_values(const float* weights, Index step, const float* v, Index n, Index d, const float* share, float* acc) {
  for (int r = 0; r < rows; ++r) {
    float* to = acc + r * d;
    for (Index c = 0; c < d; c += width) store(to + c, load(to + c) * share[r]);
    for (Index j = 0; j < n; ++j)
      for (Index c = 0; c < d; c += width) store(to + c, load(to + c) + weights[r * step + j] * load(v + j * d + c));
  }
}

template <int rows>
void tile_values(const float* weights, Index step, const float* v, Index n, Index d, const float* share, float* acc) {
  for (Index c = 0; c < d; c += panel) tile<rows>(weights, step, v + c, d, n, share, acc + c, d);
}

}  // namespace
}  // namespace levelhead::ladder
