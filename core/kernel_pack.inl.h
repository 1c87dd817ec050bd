// From the caller's arrays to the layout of the register tiles, and back: any dtype, any strides.
// Part of kernel.inl.h.
#pragma once

#include "kernel.h"
#include "kernel_tile.inl.h"

namespace levelhead {
namespace {

LH_INLINE std::int64_t least(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
LH_INLINE std::int64_t most(std::int64_t a, std::int64_t b) { return a > b ? a : b; }

template <class Real>
constexpr DType compute_type = sizeof(Real) == sizeof(double) ? DType::f64 : DType::f32;

template <class Stored>
LH_INLINE Stored read(const char* p) {
  Stored x;
  __builtin_memcpy(&x, p, sizeof x);  // the array may be aligned to nothing
  return x;
}

template <class Stored, class Real, class Widen>
LH_INLINE void widen_as(const char* from, std::int64_t stride, std::int64_t n, Real* to, Widen widen) {
  if (stride == static_cast<std::int64_t>(sizeof(Stored))) {
    for (std::int64_t i = 0; i < n; ++i)
      to[i] = static_cast<Real>(widen(read<Stored>(from + i * static_cast<std::int64_t>(sizeof(Stored)))));
  } else {
    for (std::int64_t i = 0; i < n; ++i) to[i] = static_cast<Real>(widen(read<Stored>(from + i * stride)));
  }
}

#if defined(__F16C__)
// The conversion of eight at once, which compilers do not find by themselves.
LH_INLINE void widen_halves(const char* from, std::int64_t n, float* to) {
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * i))));
  for (; i < n; ++i) to[i] = widen_f16(read<std::uint16_t>(from + 2 * i));
}
#endif

// n numbers of any dtype, `stride` bytes apart, as the compute type.
template <class Real>
void widen(const char* from, DType dtype, std::int64_t stride, std::int64_t n, Real* to) {
  switch (dtype) {
    case DType::f32: return widen_as<float>(from, stride, n, to, [](float x) { return x; });
    case DType::f64: return widen_as<double>(from, stride, n, to, [](double x) { return x; });
    case DType::f16:
#if defined(__F16C__)
      if constexpr (sizeof(Real) == sizeof(float))
        if (stride == 2) return widen_halves(from, n, to);
#endif
      return widen_as<std::uint16_t>(from, stride, n, to, [](std::uint16_t x) { return widen_f16(x); });
    case DType::bf16: return widen_as<std::uint16_t>(from, stride, n, to, [](std::uint16_t x) { return widen_bf16(x); });
    case DType::boolean: return;
  }
}

template <class Stored, class Real, class Narrow>
LH_INLINE void narrow_as(const Real* from, std::int64_t n, char* to, std::int64_t stride, Narrow narrow) {
  for (std::int64_t i = 0; i < n; ++i) {
    const Stored x = narrow(from[i]);
    __builtin_memcpy(to + i * stride, &x, sizeof x);
  }
}

template <class Real>
void narrow(const Real* from, std::int64_t n, DType dtype, char* to, std::int64_t stride) {
  switch (dtype) {
    case DType::f32: return narrow_as<float>(from, n, to, stride, [](Real x) { return static_cast<float>(x); });
    case DType::f64: return narrow_as<double>(from, n, to, stride, [](Real x) { return static_cast<double>(x); });
    case DType::f16:
      return narrow_as<std::uint16_t>(from, n, to, stride, [](Real x) { return narrow_f16(static_cast<float>(x)); });
    case DType::bf16:
      return narrow_as<std::uint16_t>(from, n, to, stride, [](Real x) { return narrow_bf16(static_cast<float>(x)); });
    case DType::boolean: return;
  }
}

// Divides a row by its length, which is taken of numbers up to one: their squares neither overflow nor vanish
// together. The zero vector stays zero.
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
    typedef std::uint16_t Halves __attribute__((vector_size(LEVELHEAD_VECTOR_BYTES / 2), aligned(1), may_alias));
    return (Vector<float>)(__builtin_convertvector(*reinterpret_cast<const Halves*>(p), Integers<float>) << 16);
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

// Calls use(reader) with the one for numbers that can be read in place; false when there is none.
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

// One row of an array of vectors: widened, and normalised when the logits are cosines.
template <class Real>
LH_INLINE void read_vector(const Tensor& x, std::int64_t b, std::int64_t head, std::int64_t row, std::int64_t n,
                           bool unit_length, Real* to) {
  widen(x.at(b, head, row), x.dtype, x.column_stride, n, to);
  if (unit_length) normalise(to, n);
}

// A row as it lies in memory where that will do, else widened into `spare`.
template <class Real>
LH_INLINE const Real* view_vector(const Tensor& x, std::int64_t b, std::int64_t head, std::int64_t row, std::int64_t n,
                                  bool unit_length, Real* spare) {
  if (x.dtype == compute_type<Real> && x.column_stride == static_cast<std::int64_t>(sizeof(Real)) && !unit_length)
    return reinterpret_cast<const Real*>(x.at(b, head, row));
  read_vector(x, b, head, row, n, unit_length, spare);
  return spare;
}

template <class Real>
LH_INLINE bool all_finite(const Real* x, std::int64_t n) {
  Vector<Real> probe{};  // NaN from the first inf or NaN on
  std::int64_t i = 0;
  for (; i + lanes<Real> <= n; i += lanes<Real>) probe += load(x + i) * Real(0);
  Real rest = 0;
  for (; i < n; ++i) rest += read<Real>(reinterpret_cast<const char*>(x + i)) * 0;
  return rest == 0 && !any<Real>(probe != probe);
}

// lanes x lanes numbers, rows to columns, by log2(lanes) perfect shuffles of x[i] with x[i + lanes / 2].
template <class Real, int... lane>
LH_INLINE void transpose(Vector<Real> (&x)[sizeof...(lane)], Lanes<lane...>) {
  constexpr int n = sizeof...(lane);
#pragma GCC unroll 4
  for (int step = 1; step < n; step *= 2) {
    Vector<Real> y[n];
#pragma GCC unroll 16
    for (int i = 0; i < n / 2; ++i) {
      y[2 * i] = __builtin_shufflevector(x[i], x[i + n / 2], (lane % 2 * n + lane / 2)...);
      y[2 * i + 1] = __builtin_shufflevector(x[i], x[i + n / 2], (lane % 2 * n + lane / 2 + n / 2)...);
    }
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) x[i] = y[i];
  }
}

// `lanes` keys into their half of a panel: number d of key i goes to panel[d * width + i].
template <class Real>
LH_INLINE void pack_key_columns(const Real* const (&keys)[lanes<Real>], std::int64_t D, Real* panel_half) {
  constexpr int n = lanes<Real>, width = panel<Real>;
  std::int64_t d = 0;
  for (; d + n <= D; d += n) {
    Vector<Real> x[n];
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) x[i] = load(keys[i] + d);
    transpose<Real>(x, AllLanes<n>{});
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) store(panel_half + (d + i) * width, x[i]);
  }
  for (; d < D; ++d)
    for (int i = 0; i < n; ++i) panel_half[d * width + i] = read<Real>(reinterpret_cast<const char*>(keys[i] + d));
}

// One block: keys in panels of `panel` keys, each D x panel; then values in panels of `panel` columns, each
// key_block x panel. Keys and columns beyond the last are zero. `scratch` has room for `lanes` keys or a value.
template <class Real>
void pack(const Job& job, std::int64_t b, std::int64_t g, std::int64_t block, const Packed& packed, void* scratch) {
  const Problem& problem = *job.problem;
  const Plan& plan = *job.plan;
  constexpr int width = panel<Real>, n = lanes<Real>;
  const std::int64_t first = block * plan.key_block;
  const std::int64_t count = least(plan.key_block, problem.S - first), padded = round_up(count, width);
  Real* spare = static_cast<Real*>(scratch);
  Real* keys = static_cast<Real*>(packed.data) + (block - packed.first_block) * plan.pack_elements();
  Real* values = keys + plan.key_elements();

  for (std::int64_t j = 0; j < padded; j += n) {
    const Real* rows[n];
    for (int i = 0; i < n; ++i) {
      Real* own = spare + i * plan.D;
      if (j + i < count) {
        rows[i] = view_vector(problem.k, b, g, first + j + i, plan.D, problem.scoring.cosine, own);
      } else {
        for (std::int64_t d = 0; d < plan.D; ++d) own[d] = 0;
        rows[i] = own;
      }
    }
    pack_key_columns<Real>(rows, plan.D, keys + j / width * width * plan.D + j % width);
  }
  if (!problem.v) return;
  bool tainted = false;
  const std::int64_t whole = plan.E / width * width;  // columns in panels that the value fills
  for (std::int64_t j = 0; j < padded; ++j) {
    const Real* row = j < count ? view_vector(problem.v, b, g, first + j, plan.E, false, spare) : nullptr;
    if (row && !all_finite(row, plan.E)) {
      tainted = true;
      row = nullptr;
    }
    Real* to = values + j * width;
    for (std::int64_t c = 0; c < whole; c += width, to += plan.key_block * width)
      for (int half = 0; half < width; half += n) store(to + half, row ? load(row + c + half) : Vector<Real>{});
    for (std::int64_t c = whole; c < plan.padded_columns; ++c)
      to[c - whole] = row && c < plan.E ? read<Real>(reinterpret_cast<const char*>(row + c)) : Real(0);
  }
  packed.tainted[block - packed.first_block] = tainted;
}

}  // namespace
}  // namespace levelhead
