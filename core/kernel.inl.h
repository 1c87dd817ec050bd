// The algorithm, once: rows of one query head against all the keys they see, in one pass.
//
//   for each key block (packed K and V stay in L2)
//     for each strip of tile_rows queries (its scores stay in L1)
//       scores of the keys the strip can see   -> score_tile, score_strip
//       exp(s - m), sums, statistics           -> softmax_row
//       acc = share * acc + weights . V        -> value_tile
//   output = acc / denominator
//
// Included by each isa_*.cpp, which sets LEVELHEAD_VECTOR_BYTES, LEVELHEAD_TILE_ROWS and the table's name.
#pragma once

#include "kernel_machine.inl.h"
#include "kernel_pack.inl.h"
#include "kernel_score.inl.h"
#include "kernel_softmax.inl.h"
#include "kernel_tile.inl.h"

namespace levelhead {
namespace {

// One worker's memory, for one query block at a time.
template <class Real>
struct Scratch {
  Real *q, *acc, *scores, *row;
  Row<Real>* rows;
  Strip* strips;
  std::uint8_t* sees;
  std::int64_t bytes = 0;

  LH_INLINE Scratch(const Plan& plan, void* base) {
    const auto carve = [&](auto*& pointer, std::int64_t n) {
      pointer = reinterpret_cast<decltype(+pointer)>(static_cast<char*>(base) + bytes);
      bytes += round_up(n * static_cast<std::int64_t>(sizeof *pointer), 64);
    };
    carve(row, most(most(plan.D, plan.padded_columns), plan.key_block) + panel<Real>);  // first: pack() uses it alone
    carve(q, plan.query_block * plan.D);
    carve(acc, plan.query_block * plan.padded_columns);
    carve(scores, tile_rows * plan.score_stride);
    carve(rows, plan.query_block);
    carve(strips, plan.strips());
    carve(sees, tile_rows * plan.key_block);
  }
};

template <class Real>
std::int64_t scratch_bytes(const Plan& plan) {
  return Scratch<Real>(plan, nullptr).bytes;
}

// Queries of a strip, interleaved as score_tile wants them; rows beyond the last are zero.
template <class Real>
void pack_queries(const Job& job, const Strip& strip, std::int64_t b, std::int64_t head, Real* row, Real* q) {
  const std::int64_t D = job.plan->D;
  for (int r = 0; r < tile_rows; ++r) {
    if (r < strip.rows) read_vector(job.problem->q, b, head, strip.t0 + r, D, job.problem->scoring.cosine, row);
    for (std::int64_t d = 0; d < D; ++d) q[d * tile_rows + r] = r < strip.rows ? row[d] : Real(0);
  }
}

// --- values that are not finite: zero in the pack, added by hand to the rows that see them ---

template <class Real>
void note_visible(const Strip& strip, const Real* scores, std::int64_t stride, std::int64_t n, std::uint8_t* sees) {
  for (int r = 0; r < strip.rows; ++r)
    for (std::int64_t j = 0; j < n; ++j) sees[r * n + j] = scores[r * stride + j] != -infinity<Real>;
}

template <class Real>
void add_tainted(const Job& job, const Strip& strip, const Span& span, std::int64_t b, std::int64_t g,
                 const Scratch<Real>& scratch, std::int64_t lo, std::int64_t n, Real* acc) {
  const Plan& plan = *job.plan;
  for (std::int64_t j = span.lo; j < span.hi; ++j) {
    read_vector(job.problem->v, b, g, j, plan.E, false, scratch.row);
    if (all_finite(scratch.row, plan.E)) continue;
    for (int r = 0; r < strip.rows; ++r)
      if (scratch.sees[r * n + j - lo])
        for (std::int64_t c = 0; c < plan.E; ++c)
          acc[r * plan.padded_columns + c] += scratch.scores[r * plan.score_stride + j - lo] * scratch.row[c];
  }
}

// --- one strip against one key block ---

template <class Real, bool statistics>
void attend_block(const Job& job, const Packed& packed, const Strip& strip, std::int64_t b, std::int64_t head,
                  std::int64_t block, const Scratch<Real>& scratch, const Real* q, Row<Real>* rows, Real* acc) {
  const Problem& problem = *job.problem;
  const Plan& plan = *job.plan;
  const Span span = visible_span(job, b, head, block, strip);
  if (span.lo >= span.hi) return;
  constexpr int width = panel<Real>;
  const std::int64_t lo = span.lo / width * width, n = round_up(span.hi, width) - lo;

  Real scale[tile_rows], share[tile_rows];
  for (int r = 0; r < tile_rows; ++r) scale[r] = static_cast<Real>(strip.scale[r]);
  const Real* keys = static_cast<const Real*>(packed.keys) + lo * plan.D;
  for (std::int64_t j = 0; j < n; j += width)
    score_tile(q, keys + j * plan.D, plan.D, scale, scratch.scores + j, plan.score_stride);
  const bool hidden = score_strip(job, strip, span, b, head, scratch.scores, lo, n, scratch.row);

  const bool tainted = problem.v && packed.tainted[block];
  if (tainted) note_visible(strip, scratch.scores, plan.score_stride, n, scratch.sees);
  for (int r = 0; r < tile_rows; ++r) share[r] = 1;
  for (int r = 0; r < strip.rows; ++r) {
    Real* s = scratch.scores + r * plan.score_stride;
    share[r] = hidden ? softmax_row<Real, statistics, true>(job, s, lo, n, rows[r])
                      : softmax_row<Real, statistics, false>(job, s, lo, n, rows[r]);
    if (problem.scoring.dropout > 0) drop_row(job, b, head, strip.position[r], s, lo, least(n, problem.S - lo));
  }
  if (!problem.v) return;
  const Real* values = static_cast<const Real*>(packed.values) + lo * width;
  for (std::int64_t c = 0; c < plan.padded_columns; c += width)
    value_tile(scratch.scores, plan.score_stride, values + c * plan.padded_keys, n, share, acc + c, plan.padded_columns);
  if (tainted) add_tainted(job, strip, span, b, head / (problem.H / problem.G), scratch, lo, n, acc);
}

// --- the end of a row ---

template <class Real>
LH_INLINE void write_output(const Real* acc, Real below, std::int64_t E, Real* spare, DType dtype, char* to,
                            std::int64_t stride) {
  for (std::int64_t c = 0; c < E; ++c) spare[c] = below == 0 ? Real(0) : acc[c] / below;
  narrow(spare, E, dtype, to, stride);
}

template <class Real>
void write_row(const Job& job, Row<Real>& row, Real* acc, std::int64_t b, std::int64_t head, std::int64_t t, Real* spare) {
  const Problem& problem = *job.problem;
  const Result& result = *job.result;
  const std::int64_t index = (b * problem.H + head) * problem.T + t;
  settle(row);
  if (result.sums) store_row(row, static_cast<Real*>(result.sums) + index * row_sums, result.counts + index * row_counts);
  if (result.acc)
    for (std::int64_t c = 0; c < problem.E; ++c) static_cast<Real*>(result.acc)[index * problem.E + c] = acc[c];
  if (result.out)
    write_output(acc, denominator(row.max, row.l, result.sinks ? result.sinks + head : nullptr), problem.E, spare,
                 result.out.dtype, result.out.at(b, head, t), result.out.column_stride);
}

template <class Real>
void finish_rows(const void* acc, std::int64_t acc_stride, const void* sums, std::int64_t sums_stride, std::int64_t n,
                 std::int64_t E, const double* sink, const MutableTensor& out, std::int64_t b, std::int64_t head,
                 std::int64_t t) {
  constexpr std::int64_t piece = 256;  // columns at a time: a width has no bound, the stack has
  Real spare[piece];
  for (std::int64_t i = 0; i < n; ++i) {
    const Real* row = static_cast<const Real*>(sums) + i * sums_stride;
    const Real below = denominator(row[0], row[1], sink);
    for (std::int64_t c = 0; c < E; c += piece)
      write_output(static_cast<const Real*>(acc) + i * acc_stride + c, below, least(piece, E - c), spare, out.dtype,
                   out.at(b, head, t + i) + c * out.column_stride, out.column_stride);
  }
}

// --- a query block against all keys ---

template <class Real, bool statistics>
void attend_rows(const Job& job, const Packed& packed, std::int64_t b, std::int64_t head, std::int64_t t0,
                 std::int64_t t1, int worker, void* memory) {
  const Plan& plan = *job.plan;
  const Scratch<Real> scratch(plan, memory);
  const std::int64_t strips = (t1 - t0 + tile_rows - 1) / tile_rows;
  std::int64_t first = plan.blocks, last = 0;  // key blocks that some strip can see
  for (std::int64_t i = 0; i < strips; ++i) {
    scratch.strips[i] = make_strip(job, b, head, t0 + i * tile_rows, t1);
    pack_queries(job, scratch.strips[i], b, head, scratch.row, scratch.q + i * tile_rows * plan.D);
    first = least(first, scratch.strips[i].first / plan.key_block);
    last = most(last, (scratch.strips[i].last + plan.key_block - 1) / plan.key_block);
  }
  for (std::int64_t i = 0; i < t1 - t0; ++i) scratch.rows[i] = Row<Real>{};
  for (std::int64_t i = 0; i < strips * tile_rows * plan.padded_columns; ++i) scratch.acc[i] = 0;

  for (std::int64_t block = first; block < last; ++block) {
    for (std::int64_t i = 0; i < strips; ++i)
      attend_block<Real, statistics>(job, packed, scratch.strips[i], b, head, block, scratch,
                                     scratch.q + i * tile_rows * plan.D, scratch.rows + i * tile_rows,
                                     scratch.acc + i * tile_rows * plan.padded_columns);
    if (interrupted(*job.interrupt, worker)) return;
  }
  for (std::int64_t i = 0; i < t1 - t0; ++i)
    write_row(job, scratch.rows[i], scratch.acc + i * plan.padded_columns, b, head, t0 + i, scratch.row);
}

template <class Real>
void attend(const Job& job, const Packed& packed, std::int64_t b, std::int64_t head, std::int64_t t0, std::int64_t t1,
            int worker, void* memory) {
  if (job.result->sums) return attend_rows<Real, true>(job, packed, b, head, t0, t1, worker, memory);
  attend_rows<Real, false>(job, packed, b, head, t0, t1, worker, memory);
}

template <class Real>
void exponentials(const void* from, void* to, std::int64_t n) {
  const Real* x = static_cast<const Real*>(from);
  Real* y = static_cast<Real*>(to);
  for (std::int64_t i = 0; i < n; ++i) {
    Real lane[lanes<Real>];
    store(lane, exp_flushed<Real>(cut_off<Real>(splat(x[i]))));
    y[i] = lane[0];
  }
}

template <class Real>
constexpr KernelTable table_for = {{tile_rows, panel<Real>}, scratch_bytes<Real>, pack<Real>, attend<Real>,
                                   finish_rows<Real>,        exponentials<Real>};

}  // namespace
}  // namespace levelhead

#define LEVELHEAD_KERNEL(isa) \
  extern "C" const levelhead::Kernel levelhead_kernel_##isa = {#isa, levelhead::table_for<float>,              \
                                                               levelhead::table_for<double>, levelhead::burn, \
                                                               levelhead::sweep}
