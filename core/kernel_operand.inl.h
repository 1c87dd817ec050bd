// What the register tiles multiply, a word at a time: numbers of the compute type, or pairs of bfloat16.
//
// In words every layout is the same. Along a product's sum a word holds `per_word` terms: neighbouring numbers of a query
// and of a key, and neighbouring keys of the weights and of the values. An odd last one has a zero beside it.
// Part of kernel.inl.h.
#pragma once

#include "kernel_read.inl.h"

namespace levelhead {
namespace {

template <class Number>
struct Numbers {
  using Real = Number;
  static constexpr int per_word = 1;

  LH_INLINE static Vector<Real> add_product(Vector<Real> sum, Real a, Vector<Real> b) { return sum + a * b; }

  // Whether rows of n numbers can be used as words in place.
  LH_INLINE static bool lies_in_words(const Tensor& x, std::int64_t) { return lies_as_computed<Real>(x); }
  LH_INLINE static void read_words(const Tensor& x, std::int64_t b, std::int64_t head, std::int64_t row, std::int64_t n,
                                   bool unit_length, Real* to) {
    read_vector(x, b, head, row, n, unit_length, to);
  }

  // The first of some rows of values; with `careful`, zeros if one of them is not finite.
  LH_INLINE static const Real* values(const Tensor& v, const HeadRows& rows, std::int64_t E, bool careful, Real* spare) {
    const Real* row = view_vector(v, rows.b, rows.head, rows.first, E, false, spare);
    if (!careful || all_finite(row, E)) return row;
    for (std::int64_t c = 0; c < E; ++c) spare[c] = 0;
    return spare;
  }
  LH_INLINE static void show(Probe<Real>& probe, const Real* words, std::int64_t n) { probe.show(words, n); }

  LH_INLINE static void make_words(Real*, std::int64_t) {}
  LH_INLINE static Real weight(const Real* row, std::int64_t j) { return row[j]; }
};

#if defined(__AVX512BF16__)

// Two bfloat16 in 32 bits, the first in the lower half. A word is stored as a float; no float operation is done on it.
// The instruction multiplies exactly and rounds each addition as an FMA does, but treats numbers below 2^-126, of
// its operands and of its sums, as zero.
struct Pairs {
  using Real = float;
  static constexpr int per_word = 2;
  static constexpr std::int64_t bytes = 2;

  LH_INLINE static Vector<float> add_product(Vector<float> sum, float a, Vector<float> b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)b, (__m512bh)_mm512_set1_ps(a));
  }

  LH_INLINE static bool lies_in_words(const Tensor& x, std::int64_t n) {
    return x.column_stride == bytes && n % per_word == 0 && x.row_stride % (per_word * bytes) == 0;
  }
  LH_INLINE static void read_words(const Tensor& x, std::int64_t b, std::int64_t head, std::int64_t row, std::int64_t n, bool,
                                   float* to) {
    const char* from = x.at(b, head, row);
    char* half = reinterpret_cast<char*>(to);
    for (std::int64_t d = 0; d < n; ++d, from += x.column_stride, half += bytes) __builtin_memcpy(half, from, bytes);
    if (n % per_word != 0) __builtin_memset(half, 0, bytes);
  }

  struct Halves {
    const char* at;
    std::int64_t stride;
  };
  LH_INLINE static Integers<float> some(const char* p) {
    return (Integers<float>)_mm512_maskz_cvtepu16_epi32(0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }

  // The first two rows of values side by side in each column. Zero instead of a row that does not exist, and with
  // `careful` instead of one that is not finite.
  LH_INLINE static const float* values(const Tensor& v, const HeadRows& rows, std::int64_t E, bool careful, float* spare) {
    static constexpr std::uint16_t zero = 0;
    Halves key[per_word];
    for (int i = 0; i < per_word; ++i) {
      key[i] = {i < rows.count ? v.at(rows.b, rows.head, rows.first + i) : nullptr, v.column_stride};
      if (careful && key[i].at) read_vector(v, rows.b, rows.head, rows.first + i, E, false, spare);
      if (!key[i].at || (careful && !all_finite(spare, E))) key[i] = {reinterpret_cast<const char*>(&zero), 0};
    }
    std::int64_t c = 0;
    if (key[0].stride == bytes && key[1].stride == bytes)
      for (; c + lanes<float> <= E; c += lanes<float>)
        store(spare + c, (Vector<float>)(some(key[0].at + c * bytes) | some(key[1].at + c * bytes) << 16));
    for (; c < E; ++c)
      for (int i = 0; i < per_word; ++i)
        __builtin_memcpy(reinterpret_cast<char*>(spare + c) + i * bytes, key[i].at + c * key[i].stride, bytes);
    return spare;
  }
  // A word is finite as a float just when its upper half is.
  LH_INLINE static void show(Probe<float>& probe, const float* words, std::int64_t n) {
    std::int64_t c = 0;
    for (; c + lanes<float> <= n; c += lanes<float>) {
      const Vector<float> word = load(words + c);
      probe.part[0] += word * 0.0f;
      probe.part[1] += (Vector<float>)((Integers<float>)word << 16) * 0.0f;
    }
    for (; c < n; ++c) {
      const std::uint32_t word = __builtin_bit_cast(std::uint32_t, words[c]);
      probe.rest += words[c] * 0 + __builtin_bit_cast(float, word << 16) * 0;
    }
  }

  // n numbers, whole vectors, into words in place: to nearest even, and a NaN stays one.
  LH_INLINE static void make_words(float* row, std::int64_t n) {
    for (std::int64_t j = 0; j < n; j += 2 * lanes<float>) {
      const Vector<float> second = j + lanes<float> < n ? load(row + j + lanes<float>) : Vector<float>{};
      store(row + j / per_word, (Vector<float>)_mm512_cvtne2ps_pbh(second, load(row + j)));
    }
  }
  LH_INLINE static float weight(const float* row, std::int64_t j) {
    return widen_bf16(read<std::uint16_t>(reinterpret_cast<const char*>(row) + j * bytes));
  }
};

#endif

}  // namespace
}  // namespace levelhead
