// Memory of the backward pass, its packed queries and keys, and writing gradients to the caller's arrays. No algorithm
// (kernel_backward.inl.h). Part of kernel.inl.h.
#pragma once

#include "kernel_score.inl.h"
#include "kernel_write.inl.h"

namespace levelhead {
namespace {

// The width of rows of sums, and of rows packed as the right side of value_tile: whole panels.
template <class Real>
LH_INLINE std::int64_t padded(std::int64_t columns) {
  return round_up(columns, panel<Real>);
}

// Cuts memory into arrays of whole cache lines.
struct Carver {
  char* base;
  std::int64_t& bytes;

  template <class Item>
  LH_INLINE void operator()(Item*& pointer, std::int64_t n) const {
    pointer = reinterpret_cast<Item*>(base + bytes);
    bytes += round_up(n * static_cast<std::int64_t>(sizeof(Item)), 64);
  }
};

// A block of query rows, packed once for all keys: as the left side of the scores, and in panels as the right side of dk
// and dv.
template <class Real>
struct Queries {
  Real *q, *dout, *q_rows, *dout_rows;
  Strip* strips;
  std::int64_t bytes = 0;

  LH_INLINE Queries(const Plan& plan, void* base) {
    const Carver carve{static_cast<char*>(base), bytes};
    carve(q, plan.query_block * plan.D);
    carve(dout, plan.query_block * plan.E);
    carve(q_rows, plan.query_block * padded<Real>(plan.D));
    carve(dout_rows, plan.query_block * padded<Real>(plan.E));
    carve(strips, plan.strips());
  }
};

template <class Real>
std::int64_t query_bytes(const Plan& plan) {
  return Queries<Real>(plan, nullptr).bytes;
}

// One worker's memory: a key block, its sums, and the matrices of a block of queries with it.
template <class Real>
struct GradientScratch {
  Real *row, *keys, *values, *key_rows, *dk, *dv, *p, *ds, *slope;
  Span* spans;
  std::int64_t bytes = 0;

  LH_INLINE GradientScratch(const Plan& plan, void* base) {
    const Carver carve{static_cast<char*>(base), bytes};
    const std::int64_t D = plan.D, E = plan.E, wide_d = padded<Real>(D), wide_e = padded<Real>(E);
    const std::int64_t block = round_up(plan.key_block, tile_rows), queries = plan.query_block;
    carve(row, most(most(D, E) * lanes<Real>, plan.key_block));
    carve(keys, plan.key_block * D);
    carve(values, plan.key_block * E);
    carve(key_rows, plan.key_block * wide_d);
    carve(dk, block * wide_d);
    carve(dv, block * wide_e);
    carve(p, queries * plan.score_stride);
    carve(ds, queries * plan.score_stride);
    carve(slope, tile_rows * plan.score_stride);
    carve(spans, plan.strips());
  }
};

template <class Real>
std::int64_t gradient_scratch_bytes(const Plan& plan) {
  return GradientScratch<Real>(plan, nullptr).bytes;
}

template <class Real>
LH_INLINE Real dot(const Real* x, const Real* y, std::int64_t n) {
  Vector<Real> part[2] = {};
  std::int64_t i = 0;
  for (; i + 2 * lanes<Real> <= n; i += 2 * lanes<Real>)
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half)
      part[half] += load(x + i + half * lanes<Real>) * load(y + i + half * lanes<Real>);
  Real total = sum<Real>(part[0] + part[1]);
  for (; i < n; ++i) total = fused(number(x + i), number(y + i), total);
  return total;
}

// --- packing ---

// The factor of a row's dot products in the caller's units, without softcap and ln 2.
LH_INLINE double natural_scale(const Job& job, const Strip& strip, int r) {
  const double cap = job.problem->scoring.softcap;
  return strip.scale[r] * (cap > 0 ? cap : ln_2);
}

// One row into its place in panels of columns `height` high, times `factor`; zero if it is not finite.
template <class Real>
LH_INLINE void place_row(const Real* row, std::int64_t n, Real factor, std::int64_t height, Real* to) {
  constexpr int width = panel<Real>;
  const std::int64_t usable = all_finite(row, n) ? n : 0;
  const auto place = [&](std::int64_t c) { return to + c / width * width * height + c % width; };
  std::int64_t c = 0;
  for (; c + lanes<Real> <= usable; c += lanes<Real>) store(place(c), load(row + c) * factor);
  for (; c < padded<Real>(n); ++c) *place(c) = c < usable ? number(row + c) * factor : Real(0);
}

template <class Real>
void pack_gradient_keys(const Job& job, std::int64_t b, std::int64_t g, std::int64_t block, const GradientScratch<Real>& scratch) {
  const Problem& problem = *job.problem;
  const Plan& plan = *job.plan;
  const bool cosine = problem.scoring.cosine;
  const std::int64_t first = block * plan.key_block, count = least(plan.key_block, problem.S - first);
  const HeadRows rows{b, g, first, count};
  pack_keys<Numbers<Real>>(problem.k, rows, plan.D, cosine, scratch.keys, scratch.row);
  pack_keys<Numbers<Real>>(problem.v, rows, plan.E, false, scratch.values, scratch.row);
  if (problem.scoring.additive) {  // where dk is summed, as the keys are packed
    for (std::int64_t i = 0; i < plan.key_block * plan.D; ++i) scratch.key_rows[i] = 0;
    return;
  }
  for (std::int64_t j = 0; j < count; ++j)
    place_row(view_vector(problem.k, b, g, first + j, plan.D, cosine, scratch.row), plan.D, Real(1), plan.key_block,
              scratch.key_rows + j * panel<Real>);
}

// Values common to all keys of a row: the logsumexp in units of ln 2, and delta = dout . out - dlse, which is subtracted
// from dp. A row that saw nothing gets +inf, so that its weights are zero; one whose delta is not finite gets NaN. Far from
// zero the logsumexp is taken apart: m, and log2 of the denominator.
template <class Real>
LH_INLINE void place_facts(const Backward& backward, std::int64_t index, Real delta, const double* sink) {
  const Gradients& given = *backward.given;
  const Real lse = static_cast<const Real*>(given.logsumexp)[index];
  const bool nothing = lse == -infinity<Real>;
  if (given.dlogsumexp) delta -= static_cast<const Real*>(given.dlogsumexp)[index];
  static_cast<Real*>(backward.delta)[index] = nothing ? Real(0) : delta;
  // In two parts: one rounding more would be the largest error of a weight near one.
  const double twos = static_cast<double>(lse) * log2_e;
  const Real most_of_it = static_cast<Real>(twos), wrong = delta - delta;
  Real* to = static_cast<Real*>(backward.lse) + 2 * index;
  to[0] = nothing ? infinity<Real> : most_of_it + wrong;
  to[1] = lse - lse == 0 ? static_cast<Real>(twos - static_cast<double>(most_of_it)) : Real(0);
  if (!backward.sums || !is_far(lse)) return;
  const Real* row = static_cast<const Real*>(backward.sums) + index * row_sums;  // max, l, ...
  if (row[0] == -infinity<Real>) return;                                         // all of it is the sink
  to[0] = row[0] + wrong;
  to[1] = static_cast<Real>(__builtin_log2(static_cast<double>(denominator(row[0], row[1], sink))));
}

// A row that does not exist: the facts of one that saw nothing.
template <class Real>
LH_INLINE void place_no_facts(const Backward& backward, std::int64_t index) {
  static_cast<Real*>(backward.delta)[index] = 0;
  static_cast<Real*>(backward.lse)[2 * index] = infinity<Real>;
  static_cast<Real*>(backward.lse)[2 * index + 1] = 0;
}
// Zeros in its place, whatever q and dout hold: neither is read.
template <class Real>
LH_INLINE void clear_query(const Plan& plan, const Queries<Real>& to, std::int64_t i) {
  for (std::int64_t d = 0; d < plan.D; ++d) to.q[i * plan.D + d] = 0;
  for (std::int64_t e = 0; e < plan.E; ++e) to.dout[i * plan.E + e] = 0;
  place_row(to.q + i * plan.D, plan.D, Real(1), plan.query_block, to.q_rows + i * panel<Real>);
  place_row(to.dout + i * plan.E, plan.E, Real(1), plan.query_block, to.dout_rows + i * panel<Real>);
}

// A block of query rows of a kv head.
template <class Real>
void pack_queries(const Job& job, const Backward& backward, const Piece& rows, void* packed, void* memory) {
  const Problem& problem = *job.problem;
  const Plan& plan = *job.plan;
  const Gradients& given = *backward.given;
  const Queries<Real> to(plan, packed);
  const GradientScratch<Real> scratch(plan, memory);
  const std::int64_t b = rows.b;
  for (std::int64_t i = 0; i < rows.row1 - rows.row0; ++i) {
    Strip& strip = to.strips[i / tile_rows];
    const int r = static_cast<int>(i % tile_rows);
    if (r == 0) make_strip(job, rows, rows.row0 + i, strip);
    const std::int64_t head = strip.head[r], t = strip.t[r];
    Real *q = to.q + i * plan.D, *dout = to.dout + i * plan.E;
    if (strip.dead[r]) {
      clear_query(plan, to, i);
      place_no_facts<Real>(backward, row_index(problem, {b, head, t}));
      continue;
    }
    read_vector(problem.q, b, head, t, plan.D, problem.scoring.cosine, q);
    read_vector(given.dout, b, head, t, plan.E, false, dout);
    place_row(q, plan.D, static_cast<Real>(natural_scale(job, strip, r)), plan.query_block, to.q_rows + i * panel<Real>);
    place_row(dout, plan.E, Real(1), plan.query_block, to.dout_rows + i * panel<Real>);
    const Real* out = view_vector(given.out, b, head, t, plan.E, false, scratch.row);
    place_facts(backward, row_index(problem, {b, head, t}), dot(out, dout, plan.E), given.sinks ? given.sinks + head : nullptr);
  }
}

// --- to the caller's arrays ---

// The gradient through x / |x|: its part orthogonal to x, divided by |x|. Zero for the zero vector.
template <class Real>
void through_norm(const Tensor& x, std::int64_t b, std::int64_t head, std::int64_t row, std::int64_t n, Real* unit, Real* gradient) {
  read_vector(x, b, head, row, n, false, unit);
  double largest = 0, squares = 0;
  for (std::int64_t i = 0; i < n; ++i) largest = largest < __builtin_fabs(double(unit[i])) ? __builtin_fabs(double(unit[i])) : largest;
  for (std::int64_t i = 0; largest > 0 && i < n; ++i) squares += (double(unit[i]) / largest) * (double(unit[i]) / largest);
  const double length = largest * __builtin_sqrt(squares);
  normalise(unit, n);
  const Real along = dot(unit, gradient, n);
  for (std::int64_t i = 0; i < n; ++i)
    gradient[i] = length == 0 ? Real(0) : static_cast<Real>((double(gradient[i]) - double(along) * double(unit[i])) / length);
}

template <class Real>
void write_gradients(const MutableTensor& to, const Tensor* normalised, const HeadRows& rows, std::int64_t n, Real* sums,
                     Real* spare) {
  if (!to) return;
  for (std::int64_t j = 0; j < rows.count; ++j, sums += padded<Real>(n)) {
    if (normalised) through_norm(*normalised, rows.b, rows.head, rows.first + j, n, spare, sums);
    narrow(sums, n, to.dtype, to.at(rows.b, rows.head, rows.first + j), to.column_stride);
  }
}

}  // namespace
}  // namespace levelhead
