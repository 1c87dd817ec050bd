// 2^x for the softmax and tanh for the softcap, in vectors. Part of kernel.inl.h.
#pragma once

#include "simd.h"
#include "state.h"

namespace levelhead {
namespace {

// 2^f on [-1/2, 1/2], doubled, as 2 + f (c1 + f (c2 + ...)): least squares with Lawson's reweighting, so nearly
// minimax. In float the error counts in units of the last place: 1.05 of them at degree 5, which rounding in FMAs
// makes 1.8. Where every product is rounded on its own that would pass 2, hence degree 6 (0.03, with rounding 1.2).
// In double relative to the result: 4e-18.
template <class Real>
struct Exp2;
template <>
struct Exp2<float> {
#if defined(__FMA__) || defined(__aarch64__)
  static constexpr float c[] = {1.386293658495094f, 0.4804447407297907f, 0.11101782878159369f, 0.019343525837138924f,
                                0.0026451414537316553f};
#else
  static constexpr float c[] = {1.386294396425638f,   0.48045293497485064f,   0.11100676372096004f,
                                0.01923712033858183f, 0.0026794564534320087f, 0.00030645098378513587f};
#endif
};
template <>
struct Exp2<double> {
  static constexpr double c[] = {
      1.3862943611198906, 0.4804530139182026, 0.11100821732964017, 0.019236258215188238,
      0.0026667116293549284, 0.00030807060914226535, 3.050546698621898e-05, 2.6430870563587026e-06,
      2.0356399157210673e-07, 1.414756665557517e-08, 8.86954072321506e-10};
};

// Cut off where exp2_flushed gives zero. That also makes -inf (hidden) finite, so that zero times it is zero.
// A NaN passes.
template <class Real>
LH_INLINE Vector<Real> cut_off(Vector<Real> x) {
  return larger(splat(static_cast<Real>(1 - Bits<Real>::bias)), x);
}

// 2^x for x <= 0 that went through cut_off. Zero below 2^-125.5 (2^-1021.5): subnormal weights would cost a
// hundred cycles each in the product with V, and a library must not change the floating-point environment.
//
// `n` vectors in step: one is a chain of fifty cycles, and written one after another too few of them fit into a
// CPU's window (two in step: 11 cycles a vector instead of 13 on Zen 4).
template <class Real, int n>
LH_INLINE void exp2_flushed(const Vector<Real> (&x)[n], Vector<Real> (&e)[n]) {
  using B = Bits<Real>;
  // Adding 1.5 * 2^mantissa leaves round(x) in the low bits of the sum. The exponent's bias,
  // less one, is added in the same step: the smallest then has the bits of zero. The polynomial's factor two compensates.
  const Real magic = Real(3) * static_cast<Real>(std::int64_t(1) << (B::mantissa - 1)) + (B::bias - 1);
  constexpr int degree = sizeof Exp2<Real>::c / sizeof(Real);
  Vector<Real> shifted[n], f[n];
#pragma GCC unroll 8
  for (int i = 0; i < n; ++i) shifted[i] = x[i] + magic;
#pragma GCC unroll 8
  for (int i = 0; i < n; ++i) f[i] = x[i] - (shifted[i] - magic);
#pragma GCC unroll 8
  for (int i = 0; i < n; ++i) e[i] = f[i] * Exp2<Real>::c[degree - 1] + Exp2<Real>::c[degree - 2];
#pragma GCC unroll 16
  for (int term = degree - 3; term >= -1; --term)
#pragma GCC unroll 8
    for (int i = 0; i < n; ++i) e[i] = e[i] * f[i] + (term < 0 ? Real(2) : Exp2<Real>::c[term < 0 ? 0 : term]);
#pragma GCC unroll 8
  for (int i = 0; i < n; ++i) e[i] *= (Vector<Real>)((Integers<Real>)shifted[i] << B::mantissa);
}
template <class Real>
LH_INLINE Vector<Real> exp2_flushed(Vector<Real> x) {
  const Vector<Real> one[1] = {x};
  Vector<Real> e[1];
  exp2_flushed<Real, 1>(one, e);
  return e[0];
}

// tanh: the rational form of Cephes' tanh.c below 0.625 (no cancellation), (1 - u) / (1 + u) with
// u = exp(-2|x|) above.
template <class Real>
LH_INLINE Vector<Real> tanh(Vector<Real> x) {
  const Vector<Real> zero{}, magnitude = select(x < zero, -x, x), z = x * x;
  const Vector<Real> u = exp2_flushed<Real>(cut_off<Real>(magnitude * static_cast<Real>(-2 * log2_e)));
  const Vector<Real> far = (Real(1) - u) / (Real(1) + u);
  const Vector<Real> above =
      (z * Real(-9.64399179425052238628e-1) + Real(-9.92877231001918586564e1)) * z + Real(-1.61468768441708447952e3);
  const Vector<Real> below =
      ((z + Real(1.12811678491632931402e2)) * z + Real(2.23548839060100448583e3)) * z + Real(4.84406305325125486048e3);
  const Vector<Real> near = x + x * z * (above / below);
  return select(magnitude < splat(Real(0.625)), near, select(x < zero, -far, far));
}

}  // namespace
}  // namespace levelhead
