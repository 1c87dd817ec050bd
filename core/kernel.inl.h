// The algorithm, once: query rows of one kv head against the keys they see, in one pass.
//
//   for each key block (packed K and V stay in L2)
//     for each strip of tile_rows query rows (its scores stay in L1)
//       scores of the keys the strip can see   -> score_tile, score_strip
//       2^(s - m), sums, statistics            -> softmax_row
//       acc = share * acc + weights . V        -> value_tile
//   output = acc / denominator
//
// Included by each isa_*.cpp, which sets LEVELHEAD_VECTOR_BYTES, LEVELHEAD_TILE_ROWS and the table's name.
#pragma once

#include "kernel_machine.inl.h"
#include "kernel_pack.inl.h"
#include "kernel_score.inl.h"
#include "kernel_softmax.inl.h"
#include "kernel_stream.inl.h"
#include "kernel_tile.inl.h"

namespace levelhead {
namespace {

// One worker's memory, for one query block at a time.
template <class Real>
struct Scratch {
  Real *q, *acc, *part, *scores, *row;
  Row<Real>* rows;
  Strip* strips;
  std::uint8_t* sees;
  std::int64_t bytes = 0;

  LH_INLINE Scratch(const Plan& plan, void* base) {
    const auto carve = [&](auto*& pointer, std::int64_t n) {
      pointer = reinterpret_cast<decltype(+pointer)>(static_cast<char*>(base) + bytes);
      bytes += round_up(n * static_cast<std::int64_t>(sizeof *pointer), 64);
    };
    // First, because pack() uses it alone: `lanes` keys there and in stream_keys, a value, a row of bias.
    carve(row, most(most(plan.D * lanes<Real>, plan.E), plan.key_block));
    carve(q, plan.query_block * plan.D);
    carve(acc, plan.query_block * plan.padded_columns);
    carve(part, tile_rows * plan.padded_columns);  // stream_values
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

// Queries of a strip, one after another; those beyond the last are zero.
template <class Real>
void pack_queries(const Job& job, const Strip& strip, std::int64_t b, Real* q) {
  const std::int64_t D = job.plan->D;
  for (int r = 0; r < tile_rows; ++r, q += D) {
    if (r < strip.rows) {
      read_vector(job.problem->q, b, strip.head[r], strip.t[r], D, job.problem->scoring.cosine, q);
    } else {
      for (std::int64_t d = 0; d < D; ++d) q[d] = 0;
    }
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

// Scores of keys [from, from + n) of a packed block; `from` is whole vectors. Half a panel where no more is wanted.
template <class Real, int rows>
LH_INLINE void multiply_keys(const Real* q, const Real* keys, std::int64_t from, std::int64_t n, std::int64_t D,
                             const Real* scale, Real* s, std::int64_t stride) {
  for (std::int64_t j = from, end = from + n; j < end;) {
    const std::int64_t within = j % panel<Real>;
    const Real* k = keys + (j - within) * D + within;
    if (within == 0 && end - j > lanes<Real>) {
      score_tile<Real, rows, 2>(q, k, D, scale, s + j - from, stride);
      j += panel<Real>;
    } else {
      score_tile<Real, rows, 1>(q, k, D, scale, s + j - from, stride);
      j += lanes<Real>;
    }
  }
}

// acc = share * acc + weights . V for keys [lo, lo + n) of the block. The chunks begin at fixed keys, wherever the
// strip begins, so that a row's bits do not depend on its neighbours.
template <class Real, int rows>
LH_INLINE void multiply_values(const Plan& plan, const Real* weights, const Real* values, std::int64_t lo,
                               std::int64_t n, const Real* share, Real* acc) {
  constexpr int width = panel<Real>;
  Real ones[tile_rows];
  for (int r = 0; r < tile_rows; ++r) ones[r] = 1;
  for (std::int64_t c = 0; c < plan.padded_columns; c += width)
    for (std::int64_t j = 0, end; j < n; j = end) {
      end = least(n, (lo + j) / value_chunk * value_chunk + value_chunk - lo);
      value_tile<Real, rows>(weights + j, plan.score_stride, values + c * plan.key_block + (lo + j) * width, end - j,
                             j == 0 ? share : ones, acc + c, plan.padded_columns);
    }
}

template <class Real, bool statistics>
void attend_block(const Job& job, const Packed& packed, bool streams, const Strip& strip, const Piece& piece,
                  std::int64_t block, const Scratch<Real>& scratch, const Real* q, Row<Real>* rows, Real* acc) {
  const Problem& problem = *job.problem;
  const Plan& plan = *job.plan;
  const Span span = visible_span(job, piece.b, block, strip);
  if (span.lo >= span.hi) return;
  constexpr int width = panel<Real>;
  const std::int64_t first = block * plan.key_block;
  // From the vector where the span begins to its last key; what follows up to a whole panel is hidden below.
  const std::int64_t lo = first + (span.lo - first) / lanes<Real> * lanes<Real>, n = round_up(span.hi - lo, width);

  Real scale[tile_rows], share[tile_rows];
  for (int r = 0; r < tile_rows; ++r) scale[r] = static_cast<Real>(strip.scale[r]);
  const std::int64_t real = span.hi - lo;
  const bool few = strip.rows <= few_rows;
  Real* room = static_cast<Real*>(packed.data) + (block - packed.first_block) * plan.pack_elements();
  bool tainted = !streams && problem.v && packed.tainted[block - packed.first_block];
  if (streams) {
    stream_keys(job, piece.b, piece.g, lo, real, q, strip.rows, scale, scratch.scores, scratch.row);
  } else {
    const auto multiply = few ? multiply_keys<Real, few_rows> : multiply_keys<Real, tile_rows>;
    multiply(q, room, lo - first, real, plan.D, scale, scratch.scores, plan.score_stride);
  }
  const bool hidden = score_strip(job, strip, span, piece.b, scratch.scores, lo, n, scratch.row);

  // Streamed values show only afterwards whether they are finite; a look at few rows costs nothing.
  if (streams || tainted) note_visible(strip, scratch.scores, plan.score_stride, n, scratch.sees);
  for (int r = 0; r < tile_rows; ++r) share[r] = 1;
  for (int r = 0; r < strip.rows; ++r) {
    Real* s = scratch.scores + r * plan.score_stride;
    share[r] = hidden ? softmax_row<Real, statistics, true>(job, s, lo, n, rows[r])
                      : softmax_row<Real, statistics, false>(job, s, lo, n, rows[r]);
    if (problem.scoring.dropout > 0)
      drop_row(job, piece.b, strip.head[r], strip.position[r], s, lo, least(n, problem.S - lo));
  }
  if (!problem.v) return;
  if (streams) {
    tainted = !stream_values(job, piece.b, piece.g, first, lo, real, scratch.scores, strip.rows, share, scratch.part, room,
                             acc);
  } else {
    const auto add = few ? multiply_values<Real, few_rows> : multiply_values<Real, tile_rows>;
    add(plan, scratch.scores + (span.lo - lo), room + plan.key_elements(), span.lo - first, span.hi - span.lo, share, acc);
  }
  if (tainted) add_tainted(job, strip, span, piece.b, piece.g, scratch, lo, n, acc);
}

// --- the end of a row ---

LH_INLINE std::int64_t row_index(const Problem& problem, std::int64_t b, std::int64_t head, std::int64_t t) {
  return (b * problem.H + head) * problem.T + t;
}

// acc / below, where nothing was seen zero; straight to its place when that has the compute type.
template <class Real>
LH_INLINE void write_output(const Real* acc, Real below, std::int64_t E, Real* spare, DType dtype, char* to,
                            std::int64_t stride) {
  const bool direct = dtype == compute_type<Real> && stride == static_cast<std::int64_t>(sizeof(Real));
  Real* quotients = direct ? reinterpret_cast<Real*>(to) : spare;
  std::int64_t c = 0;
  const Real divisor = below == 0 ? Real(1) : below;  // acc is zero then
  for (; c + lanes<Real> <= E; c += lanes<Real>) store(quotients + c, load(acc + c) / divisor);
  for (; c < E; ++c) {
    const Real quotient = acc[c] / divisor;
    __builtin_memcpy(quotients + c, &quotient, sizeof quotient);
  }
  if (!direct) narrow(spare, E, dtype, to, stride);
}

template <class Real>
void write_row(const Job& job, Row<Real>& row, Real* acc, std::int64_t b, std::int64_t head, std::int64_t t, Real* spare) {
  const Problem& problem = *job.problem;
  const Result& result = *job.result;
  const std::int64_t index = row_index(problem, b, head, t);
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

// --- a piece of work ---

template <class Real>
void keep_partial(const Job& job, const Partials& partials, std::int64_t slot, const Row<Real>& row, const Real* acc) {
  const std::int64_t E = job.plan->E;
  reinterpret_cast<Row<Real>*>(partials.rows)[slot] = row;
  for (std::int64_t c = 0; c < E; ++c) reinterpret_cast<Real*>(partials.acc)[slot * E + c] = acc[c];
}

template <class Real>
void fold(const Job& job, const Partials& partials, std::int64_t b, std::int64_t head, std::int64_t t, void* memory) {
  const Plan& plan = *job.plan;
  const Scratch<Real> scratch(plan, memory);
  const std::int64_t slot = row_index(*job.problem, b, head, t) * plan.splits;
  const Row<Real>* rows = reinterpret_cast<const Row<Real>*>(partials.rows) + slot;
  const Real* acc = reinterpret_cast<const Real*>(partials.acc) + slot * plan.E;
  Row<Real> total;
  for (std::int64_t c = 0; c < plan.E; ++c) scratch.acc[c] = 0;
  for (std::int64_t split = 0; split < plan.splits; ++split, acc += plan.E) {
    const Share<Real> share = merge(total, rows[split]);
    if (share.b == 0) continue;  // nothing seen there, nothing to add
    for (std::int64_t c = 0; c < plan.E; ++c) scratch.acc[c] = fused(scratch.acc[c], share.a, acc[c] * share.b);
  }
  write_row(job, total, scratch.acc, b, head, t, scratch.row);
}

template <class Real, bool statistics>
void attend_rows(const Job& job, const Packed& packed, bool packs, const Piece& piece, const Partials* partials,
                 std::int64_t split, int worker, void* memory) {
  const Plan& plan = *job.plan;
  const Scratch<Real> scratch(plan, memory);
  const std::int64_t count = piece.row1 - piece.row0, strips = (count + tile_rows - 1) / tile_rows;
  const bool streams = packs && plan.streams;
  std::int64_t first = piece.block1, last = piece.block0;  // key blocks that some strip can see
  for (std::int64_t i = 0; i < strips; ++i) {
    scratch.strips[i] = make_strip(job, piece, piece.row0 + i * tile_rows);
    pack_queries(job, scratch.strips[i], piece.b, scratch.q + i * tile_rows * plan.D);
    first = least(first, scratch.strips[i].first / plan.key_block);
    last = most(last, (scratch.strips[i].last + plan.key_block - 1) / plan.key_block);
  }
  for (std::int64_t i = 0; i < count; ++i) scratch.rows[i] = Row<Real>{};
  for (std::int64_t i = 0; i < strips * tile_rows * plan.padded_columns; ++i) scratch.acc[i] = 0;

  for (std::int64_t block = most(first, piece.block0); block < least(last, piece.block1); ++block) {
    Packed here = packed;
    if (packs) here.first_block = block;
    if (packs && !streams) pack<Real>(job, piece.b, piece.g, block, here, scratch.row);
    for (std::int64_t i = 0; i < strips; ++i)
      attend_block<Real, statistics>(job, here, streams, scratch.strips[i], piece, block, scratch,
                                     scratch.q + i * tile_rows * plan.D, scratch.rows + i * tile_rows,
                                     scratch.acc + i * tile_rows * plan.padded_columns);
    if (interrupted(*job.interrupt, worker)) return;
  }
  for (std::int64_t i = 0; i < count; ++i) {
    const Strip& strip = scratch.strips[i / tile_rows];
    const std::int64_t head = strip.head[i % tile_rows], t = strip.t[i % tile_rows];
    Real* acc = scratch.acc + i * plan.padded_columns;
    if (partials) {
      keep_partial(job, *partials, row_index(*job.problem, piece.b, head, t) * plan.splits + split,
                   scratch.rows[i], acc);
    } else {
      write_row(job, scratch.rows[i], acc, piece.b, head, t, scratch.row);
    }
  }
}

template <class Real>
void attend(const Job& job, const Packed& packed, bool packs, const Piece& piece, const Partials* partials,
            std::int64_t split, int worker, void* memory) {
  if (job.result->sums) return attend_rows<Real, true>(job, packed, packs, piece, partials, split, worker, memory);
  attend_rows<Real, false>(job, packed, packs, piece, partials, split, worker, memory);
}

template <class Real>
void exponentials(const void* from, void* to, std::int64_t n) {
  const Real* x = static_cast<const Real*>(from);
  Real* y = static_cast<Real*>(to);
  for (std::int64_t i = 0; i < n; ++i) {
    Real lane[lanes<Real>];
    store(lane, exp2_flushed<Real>(cut_off<Real>(splat(x[i]))));
    y[i] = lane[0];
  }
}

template <class Real>
constexpr KernelTable table_for = {
    {tile_rows, panel<Real>}, scratch_bytes<Real>, sizeof(Row<Real>),  pack<Real>,
    attend<Real>,             fold<Real>,          finish_rows<Real>, exponentials<Real>};

}  // namespace
}  // namespace levelhead

#define LEVELHEAD_KERNEL(isa) \
  extern "C" const levelhead::Kernel levelhead_kernel_##isa = {#isa, levelhead::table_for<float>,              \
                                                               levelhead::table_for<double>, levelhead::burn, \
                                                               levelhead::sweep}
