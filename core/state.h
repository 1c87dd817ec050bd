// The monoid: what is known of one query row after some of its keys, and how two such states join.
//
// The same merge joins key blocks inside the kernel, a cached prefix with new keys, and shards on
// different machines. It has an identity (nothing seen) and is associative; it is not commutative,
// since on equal maxima the earlier key is the arg-maximum.
//
// Logits are in units of ln 2, here and in the kernel: 2^x takes three operations less than exp(x) in every score
// (kernel_math.inl.h). Readers of a state multiply with ln 2.
//
// Everything here has internal linkage: each ISA compiles its own copy, and none can leak into another.
#pragma once

#include <cstdint>

namespace levelhead {

constexpr int row_sums = 8;    // max, l, h, e2, mean, m2, min, first
constexpr int row_counts = 2;  // count, argmax

namespace {

constexpr std::int64_t no_key = -1;
constexpr double ln_2 = 0.6931471805599453, log2_e = 1.4426950408889634;

template <class Real>
struct Row {
  static constexpr Real infinity = static_cast<Real>(__builtin_inf());
  Real max = -infinity;          // m: the largest visible logit
  Real l = 0;                    // sum of 2^(s - m)
  Real h = 0;                    // sum of 2^(s - m) * (s - m); entropy = log2 l - h / l
  Real e2 = 0;                   // sum of 4^(s - m); sum of p^2 = e2 / l^2
  Real mean = 0;                 // of the visible logits
  Real m2 = 0;                   // sum of (s - mean)^2
  Real min = infinity;           // the smallest visible logit
  Real first = -infinity;        // the logit of the key at position 0
  std::int64_t count = 0;        // of visible keys
  std::int64_t argmax = no_key;  // position of the first key that has the maximum
};

// How much of each side's un-normalised output goes into the joint one.
template <class Real>
struct Share {
  Real a, b;
};

inline float exp2_scalar(float x) { return __builtin_exp2f(x); }
inline double exp2_scalar(double x) { return __builtin_exp2(x); }

// x y + z with one rounding where the CPU has it. Spelled out because the compiler may else fuse either product of
// a x + b y, in each place another one, and two ways to the same sum would differ in their last bit.
inline float fused(float x, float y, float z) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(x, y, z);
#else
  return x * y + z;
#endif
}
inline double fused(double x, double y, double z) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fma(x, y, z);
#else
  return x * y + z;
#endif
}

// 2^(m_side - m), where an empty side weighs nothing: -inf - -inf is never formed.
// The side that owns the maximum weighs exactly one, and costs nothing.
template <class Real>
inline Real side_share(Real side_max, Real max) {
  if (side_max == max) return side_max == -Row<Real>::infinity ? Real(0) : Real(1);
  return side_max == -Row<Real>::infinity ? Real(0) : exp2_scalar(side_max - max);
}

// What the output alone needs: m and l.
template <class Real>
inline Share<Real> merge_softmax(Row<Real>& a, const Row<Real>& b) {
  const Real max = b.max > a.max ? b.max : a.max;
  const Share<Real> share{side_share(a.max, max), side_share(b.max, max)};
  a.l = fused(a.l, share.a, b.l * share.b);
  a.max = max;
  return share;
}

template <class Real>
inline void merge_moments(Row<Real>& a, const Row<Real>& b) {  // Chan, Golub, LeVeque 1979
  if (b.count == 0) return;
  if (a.count == 0) {
    a.mean = b.mean;
    a.m2 = b.m2;
  } else {
    const Real total = static_cast<Real>(a.count + b.count);
    const Real gap = b.mean - a.mean;
    const Real part = static_cast<Real>(b.count) / total;
    a.mean += gap * part;
    a.m2 += b.m2 + gap * gap * part * static_cast<Real>(a.count);
  }
  a.count += b.count;
  a.min = b.min < a.min ? b.min : a.min;
}

// a becomes a followed by b.
template <class Real>
inline Share<Real> merge(Row<Real>& a, const Row<Real>& b) {
  if (a.l == 0 && b.max > -Row<Real>::infinity) {  // nothing before: the first keys of most rows, of short ones the only
    a = b;
    return {Real(0), Real(1)};
  }
  const Real a_max = a.max, a_l = a.l;
  const Share<Real> share = merge_softmax(a, b);
  if (b.max > a_max) a.argmax = b.argmax;
  // Moving the reference from m_i to m turns 2^(s - m_i) (s - m_i) into w (.. + (m_i - m) 2^(s - m_i)).
  const Real h_a = share.a == 0 ? Real(0) : share.a * (a.h + (a_max - a.max) * a_l);
  const Real h_b = share.b == 0 ? Real(0) : share.b * (b.h + (b.max - a.max) * b.l);
  a.h = h_a + h_b;
  a.e2 = a.e2 * share.a * share.a + b.e2 * share.b * share.b;
  merge_moments(a, b);
  a.first = b.first > a.first ? b.first : a.first;
  return share;
}

// A visible NaN makes every field of its row that depends on it NaN, and changes no other row.
template <class Real>
inline void settle(Row<Real>& row) {
  if (row.l == row.l) return;
  row.max = row.h = row.e2 = row.mean = row.m2 = row.min = row.l;
  row.argmax = no_key;
}

// The denominator of the output: the keys' and the sink's (a natural logit: it comes from the caller). Zero only for a row that saw nothing.
template <class Real>
inline Real denominator(Real max, Real l, const double* sink) {
  if (!sink || *sink == -__builtin_inf()) return l;
  if (max == -Row<Real>::infinity) return Real(1);
  return static_cast<Real>(static_cast<double>(l) + __builtin_exp(*sink - static_cast<double>(max) * ln_2));
}

// ln of the same, times 2^max. In double, since the logits may be far from zero.
template <class Real>
inline Real natural_logsumexp(Real max, Real l, const double* sink) {
  if (max == -Row<Real>::infinity) return sink ? static_cast<Real>(*sink) : max;
  return static_cast<Real>(static_cast<double>(max) * ln_2 + __builtin_log(static_cast<double>(denominator(max, l, sink))));
}

// Whether a logsumexp is so far from zero that its rounding would be an error of 3e-5 (in double 1e-10) of a weight
// computed from it. Weights of such rows are computed from m and l.
template <class Real>
inline bool is_far(Real logsumexp) {
  constexpr Real bound = sizeof(Real) == sizeof(double) ? Real(1 << 20) : Real(1 << 10);
  return (logsumexp > bound || logsumexp < -bound) && logsumexp - logsumexp == 0;
}

template <class Real>
inline void store_row(const Row<Real>& row, Real* sums, std::int64_t* counts) {
  const Real values[row_sums] = {row.max, row.l, row.h, row.e2, row.mean, row.m2, row.min, row.first};
  for (int i = 0; i < row_sums; ++i) sums[i] = values[i];
  counts[0] = row.count;
  counts[1] = row.argmax;
}

template <class Real>
inline Row<Real> load_row(const Real* sums, const std::int64_t* counts) {
  return {sums[0], sums[1], sums[2], sums[3], sums[4], sums[5], sums[6], sums[7], counts[0], counts[1]};
}

}  // namespace
}  // namespace levelhead
