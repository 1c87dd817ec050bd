// From the caller's arrays to the layout of the register tiles. Part of kernel.inl.h.
#pragma once

#include "kernel_tile.inl.h"

namespace levelhead {
namespace {

// Prefetches the lines that belong to `steps` steps, into L2: in L1 they would take the place of what is computed with. Never
// faults.
LH_INLINE void fetch_ahead(Ahead* ahead, std::int64_t steps) {
  constexpr std::int64_t line = 64;
  if (!ahead) return;
  for (std::int64_t lines = steps * ahead->lines; lines > 0 && ahead->array < 4;) {
    Ahead::Rows& rows = ahead->arrays[ahead->array];
    if (rows.count == 0) {
      ++ahead->array;
      continue;
    }
    const std::int64_t from = ahead->byte, end = least(rows.bytes, from + lines * line);
    for (std::int64_t byte = from; byte < end; byte += line) __builtin_prefetch(rows.at + byte, 0, 2);
    ahead->byte = end;
    if (end < rows.bytes) return;
    lines -= (end - from + line - 1) / line;
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

// Up to `lanes` keys of D words, `stride` bytes apart, into their half of a panel: word d of key i goes to
// panel[d * width + i]. Keys that are missing are zero.
template <class Real>
LH_INLINE void pack_key_columns(const char* keys, std::int64_t stride, std::int64_t count, std::int64_t D, Real* panel_half) {
  constexpr int n = lanes<Real>, width = panel<Real>;
  constexpr std::int64_t bytes = sizeof(Real);
  std::int64_t d = 0;
  for (; d + n <= D; d += n) {
    Vector<Real> x[n];
    const char* key = keys + d * bytes;
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i, key += stride) x[i] = i < count ? load(reinterpret_cast<const Real*>(key)) : Vector<Real>{};
    transpose<Real, 1>(x, AllLanes<n>{});
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) store(panel_half + (d + column_of<Real>(i)) * width, x[i]);
  }
  for (; d < D; ++d)
    for (int i = 0; i < n; ++i) panel_half[d * width + i] = i < count ? read<Real>(keys + i * stride + d * bytes) : Real(0);
}

// Some keys of D numbers in panels of `panel` keys, each words x panel; keys beyond the last are zero up to a whole vector.
// `spare` has room for `lanes` keys.
template <class Operand, class Real = typename Operand::Real>
void pack_keys(const Tensor& k, const HeadRows& keys, std::int64_t D, bool cosine, Real* to, Real* spare) {
  constexpr int width = panel<Real>, n = lanes<Real>;
  const std::int64_t words = (D + Operand::per_word - 1) / Operand::per_word, count = keys.count;
  const bool in_place = Operand::lies_in_words(k, D) && !cosine;
  const std::int64_t stride = in_place ? k.row_stride : words * static_cast<std::int64_t>(sizeof(Real));
  for (std::int64_t j = 0; j < count; j += n) {
    const std::int64_t some = least(n, count - j);
    Real* place = to + j / width * width * words + j % width;
    const char* rows = k.at(keys.b, keys.head, keys.first + j);
    if (!in_place) {
      for (std::int64_t i = 0; i < some; ++i)
        Operand::read_words(k, keys.b, keys.head, keys.first + j + i, D, cosine, spare + i * words);
      rows = reinterpret_cast<const char*>(spare);
    }
    some == n ? pack_key_columns<Real>(rows, stride, n, words, place) : pack_key_columns<Real>(rows, stride, some, words, place);
  }
}

// Values of some keys in panels of `panel` columns, each the words of key_block keys x panel; columns beyond the last are
// zero up to a whole panel. With `careful`, so are keys with values that are not finite. Returns whether all were finite.
template <class Operand, class Real = typename Operand::Real>
bool pack_values(const Problem& problem, const Plan& plan, const HeadRows& keys, bool careful, Real* to, Real* spare) {
  constexpr int width = panel<Real>, n = lanes<Real>;
  const std::int64_t E = plan.E, whole = E / n * n, column_words = plan.value_words();
  Probe<Real> probe;
  for (std::int64_t j = 0; j < keys.count; j += Operand::per_word, to += width) {
    const HeadRows rest{keys.b, keys.head, keys.first + j, keys.count - j};
    const Real* row = Operand::values(problem.v, rest, E, careful, spare);
    Operand::show(probe, row, E);
    std::int64_t c = 0;
    const auto place = [&] { return to + c / width * width * column_words + c % width; };
    for (; c < whole; c += n) store(place(), load(row + c));
    for (; c < plan.padded_columns; ++c) *place() = c < E ? number(row + c) : Real(0);
  }
  return probe.finite();
}

// Whether tiles read the values in place. For few queries a pack costs more than it saves; for many it is faster, since
// rows of V in place use only some of the cache's sets (3 % at d 64 with AVX2).
template <class Real>
LH_INLINE bool values_in_place(const Problem& problem) {
  return problem.T < short_queries && lies_as_computed<Real>(problem.v) && problem.E % lanes<Real> == 0;
}

template <class Real>
bool finite_values(const Problem& problem, const HeadRows& keys) {
  Probe<Real> probe;
  const bool even = problem.v.row_stride == problem.E * static_cast<std::int64_t>(sizeof(Real));  // then they are one row
  const std::int64_t rows = even ? least(keys.count, 1) : keys.count, width = even ? keys.count * problem.E : problem.E;
  const char* row = problem.v.at(keys.b, keys.head, keys.first);
  for (std::int64_t j = 0; j < rows; ++j, row += problem.v.row_stride) probe.show(reinterpret_cast<const Real*>(row), width);
  return probe.finite();
}

// One block: keys, then values.
template <class Operand>
void pack(const Job& job, std::int64_t b, std::int64_t g, std::int64_t block, const Packed& packed, void* scratch) {
  using Real = typename Operand::Real;
  const Problem& problem = *job.problem;
  const Plan& plan = *job.plan;
  const std::int64_t first = block * plan.key_block;
  const HeadRows rows{b, g, first, least(plan.key_block, problem.S - first)};
  Real* spare = static_cast<Real*>(scratch);
  Real* keys = static_cast<Real*>(packed.data) + (block - packed.first_block) * plan.pack_words();
  Real* values = keys + plan.key_block * plan.key_words;
  pack_keys<Operand>(problem.k, rows, plan.D, problem.scoring.cosine, keys, spare);
  if (!problem.v) return;
  const bool finite = values_in_place<Real>(problem) ? finite_values<Real>(problem, rows)
                                                     : pack_values<Operand>(problem, plan, rows, false, values, spare);
  if (!finite) pack_values<Operand>(problem, plan, rows, true, values, spare);
  packed.tainted[block - packed.first_block] = !finite;
}

}  // namespace
}  // namespace levelhead
