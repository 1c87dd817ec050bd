// exp for the softmax and tanh for the softcap, in vector words. Part of kernel.inl.h.
#pragma once

#include "simd.h"

namespace levelhead {
namespace {

// 2^f on [-1/2, 1/2] as 1 + f (c1 + f (c2 + ...)): weighted least squares with Lawson's reweighting, so nearly
// minimax in relative error: 2e-9 in float, 4e-18 in double. Degree 5 would do in float with an FMA (9e-8, below
// 2 ULP in all), but not without one.
template <class Real>
struct Exp2;
template <>
struct Exp2<float> {
  static constexpr int degree = 6;
  static constexpr float c[degree] = {0.6931472028552117f,   0.24022647913615636f,   0.055503324707832f,
                                      0.009618437358235947f, 0.0013398874557270406f, 0.0001535336206295145f};
};
template <>
struct Exp2<double> {
  static constexpr int degree = 11;
  static constexpr double c[degree] = {
      0.6931471805599453,     0.2402265069591013,     0.05550410866482007,    0.009618129107594024,
      0.0013333558146776561,  0.00015403530457219275, 1.5252733491561831e-05, 1.3215435234224956e-06,
      1.017820014233361e-07,  7.073790791035066e-09,  4.434693835319089e-10};
};

constexpr double log2_e = 1.4426950408889634, ln_2 = 0.6931471805599453;

// s - m in units of ln 2, cut off below where 2^x has no normal number: exp2_flushed gives zero there.
// The cut also makes -inf (hidden) finite, so that zero times it is zero. A NaN passes.
template <class Real>
LH_INLINE Vector<Real> to_exponent(Vector<Real> difference) {
  const Vector<Real> x = difference * static_cast<Real>(log2_e);
  return larger(splat(Real(-Bits<Real>::bias)), x);
}

// 2^x for -bias <= x <= 0. Results that would be subnormal are zero: they would cost a hundred cycles each
// in the product with V, and the floating-point environment is not ours to change.
template <class Real>
LH_INLINE Vector<Real> exp2_flushed(Vector<Real> x) {
  using B = Bits<Real>;
  // Adding 1.5 * 2^mantissa leaves round(x) in the low bits of the sum; the bias rides along.
  const Real magic = Real(3) * static_cast<Real>(std::int64_t(1) << (B::mantissa - 1)) + B::bias;
  const Vector<Real> shifted = x + magic;
  const Vector<Real> f = x - (shifted - magic);
  Vector<Real> p = splat(Exp2<Real>::c[Exp2<Real>::degree - 1]);
#pragma GCC unroll 16
  for (int i = Exp2<Real>::degree - 2; i >= 0; --i) p = p * f + Exp2<Real>::c[i];
  p = p * f + Real(1);
  const Vector<Real> power = (Vector<Real>)((Integers<Real>)shifted << B::mantissa);
  return p * power;
}

// tanh: the rational form of Cephes' tanh.c below 0.625 (no cancellation), (1 - u) / (1 + u) with
// u = exp(-2|x|) above.
template <class Real>
LH_INLINE Vector<Real> tanh(Vector<Real> x) {
  const Vector<Real> zero{}, magnitude = select(x < zero, -x, x), z = x * x;
  const Vector<Real> u = exp2_flushed<Real>(to_exponent<Real>(magnitude * Real(-2)));
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
