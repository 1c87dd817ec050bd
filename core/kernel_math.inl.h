// exp for the softmax and tanh for the softcap, in vector words. Part of kernel.inl.h.
#pragma once

#include "simd.h"

namespace levelhead {
namespace {

// exp(f) on [-ln 2 / 2, ln 2 / 2], doubled, as 2 + f (c1 + f (c2 + ...)): weighted least squares with Lawson's
// reweighting, so nearly minimax in relative error: 2e-9 in float, 4e-18 in double. (Degree 5 has 9e-8 in float:
// too much for 2 ULP in all.) ln 2 in two parts, after Cody and Waite: times an exponent, the first is exact.
template <class Real>
struct Exp;
template <>
struct Exp<float> {
  static constexpr int degree = 6;
  static constexpr float c[degree] = {2.000000064705266f,  0.9999998834835155f,   0.3333286067279559f,
                                      0.0833360148474239f, 0.016748472071124985f, 0.002768711985420164f};
  static constexpr float ln_2_high = 0.693359375f, ln_2_low = -2.12194440054690581e-4f;
};
template <>
struct Exp<double> {
  static constexpr int degree = 11;
  static constexpr double c[degree] = {
      2.0,                   1.0000000000000024,    0.33333333333332427,  0.08333333333303306,
      0.016666666667102946,  0.002777777789345002,  0.0003968253886860546, 4.960298044731622e-05,
      5.5115255917469525e-06, 5.526238000267571e-07, 4.998261612979424e-08};
  static constexpr double ln_2_high = 6.93145751953125e-1, ln_2_low = 1.42860682030941723212e-6;
};

constexpr double log2_e = 1.4426950408889634, ln_2 = 0.6931471805599453;

// Cut off where exp_flushed gives zero. That also makes -inf (hidden) finite, so that zero times it is zero.
// A NaN passes.
template <class Real>
LH_INLINE Vector<Real> cut_off(Vector<Real> x) {
  return larger(splat(static_cast<Real>((1 - Bits<Real>::bias) * ln_2)), x);
}

// exp(x) for x <= 0 that went through cut_off. Zero below 2^-125.5 (2^-1021.5): subnormal weights would cost a
// hundred cycles each in the product with V, and the floating-point environment is not ours to change.
template <class Real>
LH_INLINE Vector<Real> exp_flushed(Vector<Real> x) {
  using B = Bits<Real>;
  // Adding 1.5 * 2^mantissa leaves n = round(x / ln 2) in the low bits of the sum. The bias rides along, less one:
  // the smallest n then has the bits of zero, and the polynomial's factor two makes up for the rest.
  const Real magic = Real(3) * static_cast<Real>(std::int64_t(1) << (B::mantissa - 1)) + (B::bias - 1);
  const Vector<Real> shifted = x * static_cast<Real>(log2_e) + magic;
  const Vector<Real> n = shifted - magic;
  const Vector<Real> f = (x - n * Exp<Real>::ln_2_high) - n * Exp<Real>::ln_2_low;
  Vector<Real> p = splat(Exp<Real>::c[Exp<Real>::degree - 1]);
#pragma GCC unroll 16
  for (int i = Exp<Real>::degree - 2; i >= 0; --i) p = p * f + Exp<Real>::c[i];
  p = p * f + Real(2);
  const Vector<Real> power = (Vector<Real>)((Integers<Real>)shifted << B::mantissa);
  return p * power;
}

// tanh: the rational form of Cephes' tanh.c below 0.625 (no cancellation), (1 - u) / (1 + u) with
// u = exp(-2|x|) above.
template <class Real>
LH_INLINE Vector<Real> tanh(Vector<Real> x) {
  const Vector<Real> zero{}, magnitude = select(x < zero, -x, x), z = x * x;
  const Vector<Real> u = exp_flushed<Real>(cut_off<Real>(magnitude * Real(-2)));
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
