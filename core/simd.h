// The kernel's vector types and operations, on GCC/Clang vector extensions.
//
// Width-generic: the including file sets LEVELHEAD_VECTOR_BYTES, and the same source serves SSE2, NEON,
// AVX2 and AVX-512 (or a width the CPU does not have: slow, but right, and good for tests).
// Everything has internal linkage, so that no ISA's code can be linked in place of another's.
#pragma once

#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define LH_INLINE [[gnu::always_inline]] inline

namespace levelhead {
namespace {

template <class Real>
struct Bits;
template <>
struct Bits<float> {
  using Int = std::int32_t;
  static constexpr int mantissa = 23, bias = 127;
};
template <>
struct Bits<double> {
  using Int = std::int64_t;
  static constexpr int mantissa = 52, bias = 1023;
};

template <class Real>
struct VectorOf {
  static constexpr int lanes = LEVELHEAD_VECTOR_BYTES / static_cast<int>(sizeof(Real));
  typedef Real Type __attribute__((vector_size(LEVELHEAD_VECTOR_BYTES)));
  // The same for memory that is aligned to its elements only, and may alias anything.
  typedef Real Loose __attribute__((vector_size(LEVELHEAD_VECTOR_BYTES), aligned(1), may_alias));
  typedef typename Bits<Real>::Int Integers __attribute__((vector_size(LEVELHEAD_VECTOR_BYTES)));
};
template <class Real>
using Vector = typename VectorOf<Real>::Type;
template <class Real>
using Integers = typename VectorOf<Real>::Integers;
template <class Real>
constexpr int lanes = VectorOf<Real>::lanes;

template <class Real>
constexpr Real infinity = static_cast<Real>(__builtin_inf());

template <class Real>
LH_INLINE Vector<Real> load(const Real* p) {
  return *reinterpret_cast<const typename VectorOf<Real>::Loose*>(p);
}
template <class Real>
LH_INLINE void store(Real* p, Vector<Real> x) {
  *reinterpret_cast<typename VectorOf<Real>::Loose*>(p) = x;
}
template <class Real>
LH_INLINE Vector<Real> splat(Real x) {
  return x - Vector<Real>{};
}
// a where the condition's lane is set, else b.
template <class V, class I>
LH_INLINE V select(I condition, V a, V b) {
  return condition ? a : b;
}
// The result is the second operand when the comparison is false: a NaN in it is kept.
template <class V>
LH_INLINE V larger(V a, V b) {
  return a > b ? a : b;
}
template <class V>
LH_INLINE V smaller(V a, V b) {
  return a < b ? a : b;
}

// One instruction does exactly this, but GCC does not use it when an operand is a constant. (The masked form
// with a full mask is the plain one, without the undefined operand that GCC 12 warns about.)
#if defined(__AVX512F__) && LEVELHEAD_VECTOR_BYTES == 64
LH_INLINE Vector<float> larger(Vector<float> a, Vector<float> b) { return _mm512_maskz_max_ps(0xFFFF, a, b); }
LH_INLINE Vector<float> smaller(Vector<float> a, Vector<float> b) { return _mm512_maskz_min_ps(0xFFFF, a, b); }
#elif defined(__AVX2__) && LEVELHEAD_VECTOR_BYTES == 32
LH_INLINE Vector<float> larger(Vector<float> a, Vector<float> b) { return _mm256_max_ps(a, b); }
LH_INLINE Vector<float> smaller(Vector<float> a, Vector<float> b) { return _mm256_min_ps(a, b); }
#endif

// The lane numbers 0 .. n - 1 as a list, for shuffles.
template <int... lane>
struct Lanes {};
template <int n, int... lane>
struct LanesUpTo : LanesUpTo<n - 1, n - 1, lane...> {};
template <int... lane>
struct LanesUpTo<0, lane...> {
  using Type = Lanes<lane...>;
};
template <int n>
using AllLanes = typename LanesUpTo<n>::Type;

// Across lanes, in a fixed order: the upper half joins the lower half, until one lane is left.
template <class Real, int n>
struct Across {
  typedef Real Whole __attribute__((vector_size(n * sizeof(Real))));
  typedef Real Half __attribute__((vector_size(n / 2 * sizeof(Real))));
  template <int... lane>
  LH_INLINE static Half lower(Whole x, Lanes<lane...>) {
    return __builtin_shufflevector(x, x, lane...);
  }
  template <int... lane>
  LH_INLINE static Half upper(Whole x, Lanes<lane...>) {
    return __builtin_shufflevector(x, x, (lane + n / 2)...);
  }
  LH_INLINE static Real sum(Whole x) {
    return Across<Real, n / 2>::sum(lower(x, AllLanes<n / 2>{}) + upper(x, AllLanes<n / 2>{}));
  }
  LH_INLINE static Real largest(Whole x) {
    const Half a = lower(x, AllLanes<n / 2>{}), b = upper(x, AllLanes<n / 2>{});
    return Across<Real, n / 2>::largest(a > b ? a : b);
  }
};
template <class Real>
struct Across<Real, 2> {
  typedef Real Whole __attribute__((vector_size(2 * sizeof(Real))));
  LH_INLINE static Real sum(Whole x) { return x[0] + x[1]; }
  LH_INLINE static Real largest(Whole x) { return x[0] > x[1] ? x[0] : x[1]; }
};

template <class Real>
LH_INLINE Real sum(Vector<Real> x) {
  return Across<Real, lanes<Real>>::sum(x);
}
template <class Real>
LH_INLINE Real largest(Vector<Real> x) {
  return Across<Real, lanes<Real>>::largest(x);
}
template <class Real>
LH_INLINE Real smallest(Vector<Real> x) {
  return -largest<Real>(-x);
}

// The same of n vectors at once, in the same order: after each step two of them share a vector. The result for x[i] is lane
// i % lanes of x[i / lanes]. (Twelve at once take a third of the instructions of twelve in turn, and one latency.)
template <class Real, int width, bool upper, int... lane>
LH_INLINE Vector<Real> halves(Vector<Real> a, Vector<Real> b, Lanes<lane...>) {
  constexpr int n = lanes<Real>, part = width / 2;
  constexpr auto from = [](int l) { return l / (n / 2) * n + l % (n / 2) / part * width + l % part + upper * part; };
  return __builtin_shufflevector(a, b, from(lane)...);
}
template <class Real, int n, int width = lanes<Real>, class Join>
LH_INLINE void across(Vector<Real>* x, const Join& join) {
  if constexpr (width > 1) {
    constexpr AllLanes<lanes<Real>> all{};
#pragma GCC unroll 8
    for (int i = 0; i < n; i += 2) {
      const Vector<Real> a = x[i], b = x[i + 1 < n ? i + 1 : i];
      x[i / 2] = join(halves<Real, width, false>(a, b, all), halves<Real, width, true>(a, b, all));
    }
    across<Real, (n + 1) / 2, width / 2>(x, join);
  }
}

template <class Real>
struct Pair {
  Real a, b;
};
template <class Real, class Join>
LH_INLINE Pair<Real> across_both(Vector<Real> a, Vector<Real> b, const Join& join) {
  Vector<Real> x[2] = {a, b};
  across<Real, 2>(x, join);
  return {x[0][0], x[0][1]};
}
template <class Real>
LH_INLINE Pair<Real> sum(Vector<Real> a, Vector<Real> b) {
  return across_both<Real>(a, b, [](Vector<Real> x, Vector<Real> y) { return x + y; });
}
template <class Real>
LH_INLINE Pair<Real> largest(Vector<Real> a, Vector<Real> b) {
  return across_both<Real>(a, b, [](Vector<Real> x, Vector<Real> y) { return larger(x, y); });
}

template <class Real>
LH_INLINE bool any(Integers<Real> condition) {
#if defined(__AVX512F__) && LEVELHEAD_VECTOR_BYTES == 64
  return _mm512_test_epi64_mask((__m512i)condition, (__m512i)condition) != 0;
#elif defined(__AVX2__) && LEVELHEAD_VECTOR_BYTES == 32
  return !_mm256_testz_si256((__m256i)condition, (__m256i)condition);
#else
  typename Bits<Real>::Int part[lanes<Real>], all = 0;
  __builtin_memcpy(part, &condition, sizeof part);
  for (int i = 0; i < lanes<Real>; ++i) all |= part[i];
  return all != 0;
#endif
}

// Whether a lane has this value.
template <class Real>
LH_INLINE bool any_is(Vector<Real> x, Real value) {
  return any<Real>(x == value);
}
#if defined(__AVX512F__) && LEVELHEAD_VECTOR_BYTES == 64
template <>
LH_INLINE bool any_is<float>(Vector<float> x, float value) {
  return _mm512_cmp_ps_mask(x, splat(value), _CMP_EQ_OQ) != 0;
}
#endif

// --- parts of vectors: no memory beyond them is touched ---

#if defined(__AVX512F__) && LEVELHEAD_VECTOR_BYTES == 64
template <class Real>
constexpr bool can_load_parts = sizeof(Real) == sizeof(float);

LH_INLINE __mmask16 lanes_before(int n) { return static_cast<__mmask16>((1u << n) - 1); }
// Lanes [n, lanes), or [0, n), of the vector at p, with zero in the others; and stores of these lanes.
LH_INLINE Vector<float> load_from(const float* p, int n) { return _mm512_maskz_loadu_ps(static_cast<__mmask16>(~lanes_before(n)), p); }
LH_INLINE Vector<float> load_until(const float* p, int n) { return _mm512_maskz_loadu_ps(lanes_before(n), p); }
LH_INLINE void store_from(float* p, Vector<float> x, int n) { _mm512_mask_storeu_ps(p, static_cast<__mmask16>(~lanes_before(n)), x); }
LH_INLINE void store_until(float* p, Vector<float> x, int n) { _mm512_mask_storeu_ps(p, lanes_before(n), x); }
// Lane i of the result is lane (i + n) mod lanes.
LH_INLINE Vector<float> rotated(Vector<float> x, int n) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_maskz_permutexvar_ps(0xFFFF, _mm512_maskz_add_epi32(0xFFFF, first, _mm512_set1_epi32(n)), x);
}
#else
template <class Real>
constexpr bool can_load_parts = false;
#endif

// --- half precision, one number at a time; rows of them in kernel_read.inl.h ---

LH_INLINE float widen_bf16(std::uint16_t h) {
  return __builtin_bit_cast(float, static_cast<std::uint32_t>(h) << 16);
}

// Round to nearest even; a NaN stays one (its payload may go).
LH_INLINE std::uint16_t narrow_bf16(float x) {
  const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, x);
  const std::uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  return static_cast<std::uint16_t>(x == x ? rounded : (bits >> 16) | 0x40);
}

LH_INLINE float widen_f16(std::uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000) << 16;
  const std::uint32_t rest = h & 0x7FFF;
  if (rest >= 0x7C00)  // inf, NaN
    return __builtin_bit_cast(float, sign | 0x7F800000 | (rest & 0x3FF) << 13 | (rest > 0x7C00 ? 0x400000 : 0));
  if (rest >= 0x0400)  // normal: the exponent moves from bias 15 to bias 127
    return __builtin_bit_cast(float, sign | ((rest << 13) + ((127 - 15) << 23)));
  const float magnitude = static_cast<float>(rest) * 0x1p-24f;  // subnormal in half, normal in float
  return __builtin_bit_cast(float, sign | __builtin_bit_cast(std::uint32_t, magnitude));
#endif
}

LH_INLINE std::uint16_t narrow_f16(float x) {
#if defined(__F16C__)
  return static_cast<std::uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
#else
  const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, x);
  const std::uint32_t sign = (bits >> 16) & 0x8000, rest = bits & 0x7FFFFFFF;
  if (rest > 0x7F800000) return static_cast<std::uint16_t>(sign | 0x7E00 | ((rest >> 13) & 0x3FF));
  if (rest >= 0x477FF000) return static_cast<std::uint16_t>(sign | 0x7C00);  // 65520 and above round to inf
  if (rest >= 0x38800000)                                                    // normal in half
    return static_cast<std::uint16_t>(sign | ((rest + 0xFFF + ((rest >> 13) & 1) - (112u << 23)) >> 13));
  // Subnormal: adding 0.5 puts half's last place at float's last place, so the adder does the rounding.
  const float shifted = __builtin_bit_cast(float, rest) + 0.5f;
  return static_cast<std::uint16_t>(sign | (__builtin_bit_cast(std::uint32_t, shifted) - 0x3F000000));
#endif
}

}  // namespace
}  // namespace levelhead
