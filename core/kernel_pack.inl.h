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

// Whether a row can be used where it lies.
template <class Real, class Byte>
LH_INLINE bool lies_as_computed(const View<Byte>& x) {
  constexpr std::int64_t bytes = sizeof(Real);
  return x.dtype == compute_type<Real> && x.column_stride == bytes && x.row_stride % bytes == 0;
}

// Becomes NaN with the first inf or NaN it is shown; then there is no way back. Four chains, or a sum's latency
// would be the time of it.
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

// Asks for the lines that are due after so many steps. Never faults.
LH_INLINE void fetch_ahead(Ahead* ahead, std::int64_t steps) {
  constexpr std::int64_t line = 64;
  if (!ahead) return;
  for (std::int64_t lines = steps * ahead->lines; lines > 0 && ahead->array < 4;) {
    Ahead::Rows& rows = ahead->arrays[ahead->array];
    if (rows.count == 0) {
      ++ahead->array;
      continue;
    }
    for (; lines > 0 && ahead->byte < rows.bytes; ahead->byte += line, --lines) __builtin_prefetch(rows.at + ahead->byte);
    if (ahead->byte < rows.bytes) return;
    ahead->byte = 0;
    rows.at += rows.stride;
    --rows.count;
  }
}

// lanes x lanes numbers, rows to columns, by log2(lanes) exchanges of blocks between rows `unit` apart. They are those
// that CPUs have an instruction for: within 128 bits the halves of two rows are interleaved, beyond that the even and
// the odd 128 bits of two rows are brought together.
template <class Real>
constexpr int in_128 = 16 / static_cast<int>(sizeof(Real));

template <class Real, int unit>
constexpr int taken_from(int lane, bool upper) {
  constexpr int n = lanes<Real>, piece = in_128<Real>;
  const int at = lane % piece, which = lane / piece;
  if (unit < piece) return which * piece + at / (2 * unit) * unit + at % unit + at / unit % 2 * n + upper * (piece / 2);
  return which % (n / piece / 2) * 2 * piece + at + which / (n / piece / 2) * n + upper * piece;
}

template <class Real, int unit, int... lane>
LH_INLINE void transpose(Vector<Real> (&x)[sizeof...(lane)], Lanes<lane...> all) {
  if constexpr (unit < sizeof...(lane)) {
#pragma GCC unroll 16
    for (int i = 0; i < static_cast<int>(sizeof...(lane)); ++i)
      if ((i & unit) == 0) {
        const Vector<Real> a = x[i], b = x[i + unit];
        x[i] = __builtin_shufflevector(a, b, taken_from<Real, unit>(lane, false)...);
        x[i + unit] = __builtin_shufflevector(a, b, taken_from<Real, unit>(lane, true)...);
      }
    transpose<Real, 2 * unit>(x, all);
  }
}

// The column that is in x[i] then: interleaving takes the columns of 128 bits in the reverse order of their bits.
template <class Real>
constexpr int column_of(int i) {
  return in_128<Real> == 4 ? (i & ~3) | (i & 1) << 1 | (i >> 1 & 1) : i;
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
    transpose<Real, 1>(x, AllLanes<n>{});
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) store(panel_half + (d + column_of<Real>(i)) * width, x[i]);
  }
  for (; d < D; ++d)
    for (int i = 0; i < n; ++i) panel_half[d * width + i] = number(keys[i] + d);
}

// Keys [first, first + count) in panels of `panel` keys, each D x panel; keys beyond the last are zero up to a whole
// vector. `spare` has room for `lanes` keys and one more.
template <class Real>
void pack_keys(const Tensor& k, bool cosine, std::int64_t D, std::int64_t b, std::int64_t g, std::int64_t first,
               std::int64_t count, Real* to, Real* spare) {
  constexpr int width = panel<Real>, n = lanes<Real>;
  const bool in_place = lies_as_computed<Real>(k) && !cosine;
  const char* row = k.at(b, g, first);
  Real* nothing = spare + n * D;
  if (count % n != 0)
    for (std::int64_t d = 0; d < D; ++d) nothing[d] = 0;
  for (std::int64_t j = 0; j < count; j += n) {
    const Real* rows[n];
    for (int i = 0; i < n; ++i, row += k.row_stride) {
      rows[i] = j + i >= count ? nothing : in_place ? reinterpret_cast<const Real*>(row) : spare + i * D;
      if (!in_place && j + i < count)
        read_vector(k, b, g, first + j + i, D, cosine, spare + i * D);
    }
    pack_key_columns<Real>(rows, D, to + j / width * width * D + j % width);
  }
}

// Values of keys [first, first + count) in panels of `panel` columns, each key_block x panel; columns beyond the last
// are zero up to a whole panel. With `careful`, so are values that are not finite.
// Returns whether all were finite.
template <class Real>
bool pack_values(const Problem& problem, const Plan& plan, std::int64_t b, std::int64_t g, std::int64_t first,
                 std::int64_t count, bool careful, Real* to, Real* spare) {
  constexpr int width = panel<Real>, n = lanes<Real>;
  const std::int64_t E = plan.E, whole = E / n * n;
  Probe<Real> probe;
  for (std::int64_t j = 0; j < count; ++j, to += width) {
    const Real* row = view_vector(problem.v, b, g, first + j, E, false, spare);
    probe.show(row, E);
    if (careful && !all_finite(row, E)) {
      for (std::int64_t c = 0; c < E; ++c) spare[c] = 0;
      row = spare;
    }
    std::int64_t c = 0;
    const auto place = [&] { return to + c / width * width * plan.key_block + c % width; };
    for (; c < whole; c += n) store(place(), load(row + c));
    for (; c < plan.padded_columns; ++c) *place() = c < E ? number(row + c) : Real(0);
  }
  return probe.finite();
}

// Whether tiles read the values where they lie. Few queries do not pay for a pack; many are better served by one, since
// rows of V in place use only some of the cache's sets (3 % at d 64 with AVX2).
template <class Real>
LH_INLINE bool values_in_place(const Problem& problem) {
  return problem.T < short_queries && lies_as_computed<Real>(problem.v) && problem.E % lanes<Real> == 0;
}

template <class Real>
bool finite_values(const Problem& problem, std::int64_t b, std::int64_t g, std::int64_t first, std::int64_t count) {
  Probe<Real> probe;
  const char* row = problem.v.at(b, g, first);
  for (std::int64_t j = 0; j < count; ++j, row += problem.v.row_stride)
    probe.show(reinterpret_cast<const Real*>(row), problem.E);
  return probe.finite();
}

// One block: keys, then values.
template <class Real>
void pack(const Job& job, std::int64_t b, std::int64_t g, std::int64_t block, const Packed& packed, void* scratch) {
  const Problem& problem = *job.problem;
  const Plan& plan = *job.plan;
  const std::int64_t first = block * plan.key_block, count = least(plan.key_block, problem.S - first);
  Real* spare = static_cast<Real*>(scratch);
  Real* keys = static_cast<Real*>(packed.data) + (block - packed.first_block) * plan.pack_elements();
  Real* values = keys + plan.key_elements();
  pack_keys(problem.k, problem.scoring.cosine, plan.D, b, g, first, count, keys, spare);
  if (!problem.v) return;
  const bool finite = values_in_place<Real>(problem) ? finite_values<Real>(problem, b, g, first, count)
                                                     : pack_values(problem, plan, b, g, first, count, false, values, spare);
  if (!finite) pack_values(problem, plan, b, g, first, count, true, values, spare);
  packed.tainted[block - packed.first_block] = !finite;
}

}  // namespace
}  // namespace levelhead
