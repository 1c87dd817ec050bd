// Numbers of the caller's arrays, any dtype, any strides: to the compute type and back. Part of kernel.inl.h.
#pragma once

#include "kernel.h"
#include "simd.h"

namespace levelhead {
namespace {

LH_INLINE std::int64_t least(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
LH_INLINE std::int64_t most(std::int64_t a, std::int64_t b) { return a > b ? a : b; }

template <class Real>
constexpr DType compute_type = sizeof(Real) == sizeof(double) ? DType::f64 : DType::f32;

// A number of a caller's array, which may have any alignment.
template <class Stored>
LH_INLINE Stored read(const void* p) {
  Stored x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
template <class Real>
LH_INLINE Real number(const Real* p) {
  return read<Real>(p);
}

// --- numbers in memory as vectors of the compute type ---

template <class Real>
struct AsTheyAre {
  static constexpr std::int64_t bytes = sizeof(Real);
  LH_INLINE static Vector<Real> some(const char* p) { return load(reinterpret_cast<const Real*>(p)); }
  LH_INLINE static Real one(const char* p) { return read<Real>(p); }
};
struct FromBf16 {
  static constexpr std::int64_t bytes = 2;
  LH_INLINE static Vector<float> some(const char* p) {
#if defined(__AVX512F__) && LEVELHEAD_VECTOR_BYTES == 64
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return (Vector<float>)((Integers<float>)_mm512_maskz_cvtepu16_epi32(0xFFFF, halves) << 16);
#elif defined(__AVX2__) && LEVELHEAD_VECTOR_BYTES == 32
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return (Vector<float>)((Integers<float>)_mm256_cvtepu16_epi32(halves) << 16);
#else
    typedef std::uint16_t Halves __attribute__((vector_size(LEVELHEAD_VECTOR_BYTES / 2), aligned(1), may_alias));
    return (Vector<float>)(__builtin_convertvector(*reinterpret_cast<const Halves*>(p), Integers<float>) << 16);
#endif
  }
  LH_INLINE static float one(const char* p) { return widen_bf16(read<std::uint16_t>(p)); }
};
struct FromF16 {
  static constexpr std::int64_t bytes = 2;
  LH_INLINE static Vector<float> some(const char* p) {
    Vector<float> x;
#if defined(__AVX512F__) && LEVELHEAD_VECTOR_BYTES == 64
    x = _mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__) && LEVELHEAD_VECTOR_BYTES == 32
    x = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    float lane[lanes<float>];
    for (int i = 0; i < lanes<float>; ++i) lane[i] = one(p + 2 * i);
    x = load(lane);
#endif
    return x;
  }
  LH_INLINE static float one(const char* p) { return widen_f16(read<std::uint16_t>(p)); }
};

// --- numbers of any dtype ---

template <class Stored, class Real, class Widen>
LH_INLINE void widen_as(const char* from, std::int64_t stride, std::int64_t n, Real* to, Widen widen) {
  if (stride == static_cast<std::int64_t>(sizeof(Stored))) {
    for (std::int64_t i = 0; i < n; ++i)
      to[i] = static_cast<Real>(widen(read<Stored>(from + i * static_cast<std::int64_t>(sizeof(Stored)))));
  } else {
    for (std::int64_t i = 0; i < n; ++i) to[i] = static_cast<Real>(widen(read<Stored>(from + i * stride)));
  }
}

// Half types side by side, a vector at once: compilers widen them in small steps.
template <class Reader>
LH_INLINE void widen_halves(const char* from, std::int64_t n, float* to) {
  std::int64_t i = 0;
  for (; i + lanes<float> <= n; i += lanes<float>) store(to + i, Reader::some(from + i * Reader::bytes));
  for (; i < n; ++i) to[i] = Reader::one(from + i * Reader::bytes);
}

// n numbers of any dtype, `stride` bytes apart, as the compute type.
template <class Real>
void widen(const char* from, DType dtype, std::int64_t stride, std::int64_t n, Real* to) {
  switch (dtype) {
    case DType::f32: return widen_as<float>(from, stride, n, to, [](float x) { return x; });
    case DType::f64: return widen_as<double>(from, stride, n, to, [](double x) { return x; });
    case DType::f16:
      if constexpr (sizeof(Real) == sizeof(float))
        if (stride == FromF16::bytes) return widen_halves<FromF16>(from, n, to);
      return widen_as<std::uint16_t>(from, stride, n, to, [](std::uint16_t x) { return widen_f16(x); });
    case DType::bf16:
      if constexpr (sizeof(Real) == sizeof(float))
        if (stride == FromBf16::bytes) return widen_halves<FromBf16>(from, n, to);
      return widen_as<std::uint16_t>(from, stride, n, to, [](std::uint16_t x) { return widen_bf16(x); });
    case DType::boolean: return;
  }
}

template <class Stored, class Real, class Narrow>
LH_INLINE void narrow_as(const Real* from, std::int64_t n, char* to, std::int64_t stride, Narrow narrow) {
  constexpr std::int64_t bytes = sizeof(Stored);
  const auto put = [&](std::int64_t i, char* place) {
    const Stored x = narrow(from[i]);
    __builtin_memcpy(place, &x, sizeof x);
  };
  if (stride == bytes) {  // the compiler vectorises this loop
    for (std::int64_t i = 0; i < n; ++i) put(i, to + i * bytes);
  } else {
    for (std::int64_t i = 0; i < n; ++i) put(i, to + i * stride);
  }
}

// To half types side by side, a vector at once, rounded as narrow_f16 and narrow_bf16 do.
LH_INLINE void store_f16(const Vector<float>& x, char* to) {
#if defined(__AVX512F__) && LEVELHEAD_VECTOR_BYTES == 64
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_maskz_cvtps_ph(0xFFFF, x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__) && LEVELHEAD_VECTOR_BYTES == 32
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#else
  narrow_as<std::uint16_t>(reinterpret_cast<const float*>(&x), lanes<float>, to, 2, narrow_f16);
#endif
}
LH_INLINE void store_bf16(const Vector<float>& x, char* to) {
  typedef std::uint16_t Halves __attribute__((vector_size(LEVELHEAD_VECTOR_BYTES / 2), aligned(1), may_alias));
  typedef std::uint32_t Words __attribute__((vector_size(LEVELHEAD_VECTOR_BYTES)));
  const Words bits = (Words)x, rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16, nan = bits >> 16 | 0x40;
  *reinterpret_cast<Halves*>(to) = __builtin_convertvector(x == x ? rounded : nan, Halves);
}

// n numbers of the compute type to any dtype, `stride` bytes apart.
template <class Real>
void narrow(const Real* from, std::int64_t n, DType dtype, char* to, std::int64_t stride) {
  std::int64_t whole = 0;
  if constexpr (sizeof(Real) == sizeof(float))
    if (stride == 2)
      for (; whole + lanes<float> <= n; whole += lanes<float>) {
        const Vector<float> x = load(from + whole);
        dtype == DType::f16 ? store_f16(x, to + 2 * whole) : store_bf16(x, to + 2 * whole);
      }
  const Real* rest = from + whole;
  const std::int64_t left = n - whole;
  char* place = to + whole * stride;
  switch (dtype) {
    case DType::f32: return narrow_as<float>(rest, left, place, stride, [](Real x) { return static_cast<float>(x); });
    case DType::f64: return narrow_as<double>(rest, left, place, stride, [](Real x) { return static_cast<double>(x); });
    case DType::f16:
      return narrow_as<std::uint16_t>(rest, left, place, stride, [](Real x) { return narrow_f16(static_cast<float>(x)); });
    case DType::bf16:
      return narrow_as<std::uint16_t>(rest, left, place, stride, [](Real x) { return narrow_bf16(static_cast<float>(x)); });
    case DType::boolean: return;
  }
}

// Divides a row by its length, computed from numbers scaled to at most one: their squares do not overflow, and not all
// underflow. The zero vector stays zero.
template <class Real>
void normalise(Real* row, std::int64_t n) {
  double largest = 0, squares = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const double x = __builtin_fabs(static_cast<double>(row[i]));
    largest = largest < x ? x : largest;
  }
  if (largest == 0) return;
  for (std::int64_t i = 0; i < n; ++i) {
    const double x = static_cast<double>(row[i]) / largest;
    squares += x * x;
  }
  const double length = __builtin_sqrt(squares);
  for (std::int64_t i = 0; i < n; ++i) row[i] = static_cast<Real>(static_cast<double>(row[i]) / largest / length);
}

// Calls use(reader) with the reader of the array's numbers if they can be read in place; else returns false.
template <class Real, class Use>
LH_INLINE bool read_in_place(const Tensor& x, const Use& use) {
  if (x.dtype == compute_type<Real> && x.column_stride == AsTheyAre<Real>::bytes) return use(AsTheyAre<Real>{});
  if constexpr (sizeof(Real) == sizeof(float)) {
    if (x.dtype == DType::bf16 && x.column_stride == FromBf16::bytes) return use(FromBf16{});
    if (x.dtype == DType::f16 && x.column_stride == FromF16::bytes) return use(FromF16{});
  }
  return false;
}

// --- rows ---

// Rows [first, first + count) of one head of an array.
struct HeadRows {
  std::int64_t b, head, first, count;
};

// One row of an array of vectors: widened, and normalised when the logits are cosines.
template <class Real>
LH_INLINE void read_vector(const Tensor& x, std::int64_t b, std::int64_t head, std::int64_t row, std::int64_t n,
                           bool unit_length, Real* to) {
  widen(x.at(b, head, row), x.dtype, x.column_stride, n, to);
  if (unit_length) normalise(to, n);
}

// A row in place if it has the compute type, else widened into `spare`.
template <class Real>
LH_INLINE const Real* view_vector(const Tensor& x, std::int64_t b, std::int64_t head, std::int64_t row, std::int64_t n,
                                  bool unit_length, Real* spare) {
  if (x.dtype == compute_type<Real> && x.column_stride == static_cast<std::int64_t>(sizeof(Real)) && !unit_length)
    return reinterpret_cast<const Real*>(x.at(b, head, row));
  read_vector(x, b, head, row, n, unit_length, spare);
  return spare;
}

// Whether a row can be used in place.
template <class Real, class Byte>
LH_INLINE bool lies_as_computed(const View<Byte>& x) {
  constexpr std::int64_t bytes = sizeof(Real);
  return x.dtype == compute_type<Real> && x.column_stride == bytes && x.row_stride % bytes == 0;
}

// Becomes NaN with the first inf or NaN, and stays NaN. Four independent chains hide the latency of an addition.
template <class Real>
struct Probe {
  Vector<Real> part[4] = {};
  Real rest = 0;

  LH_INLINE void show(const Real* x, std::int64_t n) {
    std::int64_t i = 0;
    for (; i + 4 * lanes<Real> <= n; i += 4 * lanes<Real>)
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) part[k] += load(x + i + k * lanes<Real>) * Real(0);
    for (; i + lanes<Real> <= n; i += lanes<Real>) part[0] += load(x + i) * Real(0);
    for (; i < n; ++i) rest += number(x + i) * 0;
  }
  LH_INLINE bool finite() const {
    const Vector<Real> all = (part[0] + part[1]) + (part[2] + part[3]);
    return rest == 0 && !any<Real>(all != all);
  }
};

template <class Real>
LH_INLINE bool all_finite(const Real* x, std::int64_t n) {
  Probe<Real> probe;
  probe.show(x, n);
  return probe.finite();
}

}  // namespace
}  // namespace levelhead
