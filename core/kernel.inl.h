// The algorithm, once: query rows of one kv head against the keys they see, in one pass.
//
//   for each key block (packed K and V stay in L2)
//     for each strip of tile_rows query rows (its scores stay in L1)
//       scores of the keys the strip can see   -> score_tile, score_strip
//       2^(s - m), sums, statistics            -> softmax_strip
//       acc = share * acc + weights . V        -> value_tile
//   output = acc / denominator               -> in the last value_tile, or write_row
//
// Included by each isa_*.cpp, which sets LEVELHEAD_VECTOR_BYTES, LEVELHEAD_TILE_ROWS and the table's name.
#pragma once

#include "kernel.h"
#include "kernel_additive.inl.h"
#include "kernel_backward.inl.h"
#include "kernel_machine.inl.h"
#include "kernel_pack.inl.h"
#include "kernel_score.inl.h"
#include "kernel_softmax.inl.h"
#include "kernel_stream.inl.h"
#include "kernel_tile.inl.h"
#include "kernel_write.inl.h"

namespace levelhead {
namespace {

// Where a strip stands between two key blocks.
template <class Real>
struct Progress {
  const Real* q;        // its queries, q_step apart
  std::int64_t q_step;
  Row<Real>* rows;      // the states of its rows
  Real* acc;            // their sums of values, padded_columns apart
  bool begun, written;  // whether acc holds something; whether the output is written
};

// One worker's memory, for one query block at a time.
template <class Real>
struct Scratch {
  Real *q, *acc, *part, *scores, *row;
  Row<Real>* rows;
  Strip* strips;
  Progress<Real>* progress;
  std::uint8_t* sees;
  std::int64_t bytes = 0;

  LH_INLINE Scratch(const Plan& plan, void* base) {
    const auto carve = [&](auto*& pointer, std::int64_t n) {
      pointer = reinterpret_cast<decltype(+pointer)>(static_cast<char*>(base) + bytes);
      bytes += round_up(n * static_cast<std::int64_t>(sizeof *pointer), 64);
    };
    // First, because pack() uses only this part: `lanes` keys there and in stream_keys, a value, a row of bias.
    carve(row, most(most(plan.D * lanes<Real>, plan.E), plan.key_block));
    carve(q, plan.query_block * plan.key_words);
    carve(acc, plan.query_block * plan.padded_columns);
    carve(part, tile_rows * plan.padded_columns);  // stream_values
    carve(scores, tile_rows * plan.score_stride);
    carve(rows, plan.query_block);
    carve(strips, plan.strips());
    carve(progress, plan.strips());
    carve(sees, tile_rows * plan.key_block);
  }
};

template <class Real>
std::int64_t scratch_bytes(const Plan& plan) {
  return Scratch<Real>(plan, nullptr).bytes;
}

// Whether the rows of a strip fill a tile with one stride: then a tile can use them in place, if they are in words.
template <class Array>
LH_INLINE bool tile_in_place(const Array& x, const Problem& problem, const Strip& strip) {
  return strip.rows == rows_of_tile(strip.rows) &&
         (strip.head[0] == strip.head[strip.rows - 1] || x.head_stride == problem.T * x.row_stride);
}

// Strip i of a query block. Its queries stay in place, or are copied one after another, with zeros beyond the last. A strip
// that sees no key needs none.
template <class Operand, class Real = typename Operand::Real>
Progress<Real> begin_strip(const Job& job, const Strip& strip, std::int64_t i, bool streams, const Scratch<Real>& scratch) {
  const Problem& problem = *job.problem;
  const std::int64_t D = job.plan->key_words, first = i * tile_rows;
  Row<Real>* rows = scratch.rows + first;
  Real* acc = scratch.acc + first * job.plan->padded_columns;
  if (!streams && !problem.scoring.cosine && Operand::lies_in_words(problem.q, problem.D) &&
      tile_in_place(problem.q, problem, strip))
    return {reinterpret_cast<const Real*>(problem.q.at(strip.b, strip.head[0], strip.t[0])),
            problem.q.row_stride / static_cast<std::int64_t>(sizeof(Real)), rows, acc, false, false};
  Real *const room = scratch.q + first * D, *q = room;
  if (strip.first >= strip.last) return {room, D, rows, acc, false, false};
  for (int r = 0; r < tile_rows; ++r, q += D) {
    if (r < strip.rows) {
      Operand::read_words(problem.q, strip.b, strip.head[r], strip.t[r], problem.D, problem.scoring.cosine, q);
    } else {
      for (std::int64_t d = 0; d < D; ++d) q[d] = 0;
    }
  }
  return {room, D, rows, acc, false, false};
}

// The keys of a block that a strip sees and those it computes: from the vector where these begin, on
// to whole vectors; columns beyond the last key are hidden.
struct Stretch {
  std::int64_t first, lo, n;  // the block's first key, the first computed, how many
  Span seen;

  LH_INLINE std::int64_t real() const { return seen.hi - lo; }
};

template <class Real>
LH_INLINE Stretch stretch_of(const Span& span, std::int64_t first) {
  const std::int64_t lo = first + (span.lo - first) / lanes<Real> * lanes<Real>;
  return {first, lo, round_up(span.hi - lo, lanes<Real>), span};
}

// One key block of a piece of work.
template <class Real>
struct BlockWork {
  const Job& job;
  const Piece& piece;
  const Packed& packed;
  const Scratch<Real>& scratch;
  std::int64_t block;
  bool streams;  // keys and values are read in place
};

// --- values that are not finite: zero in the pack, added separately to the rows that see them ---

template <class Real>
void note_visible(const Strip& strip, const Real* scores, std::int64_t stride, std::int64_t n, std::uint8_t* sees) {
  for (int r = 0; r < strip.rows; ++r)
    for (std::int64_t j = 0; j < n; ++j) sees[r * n + j] = scores[r * stride + j] != -infinity<Real>;
}

template <class Operand, class Real = typename Operand::Real>
void add_tainted(const BlockWork<Real>& work, const Strip& strip, const Stretch& keys, Real* acc) {
  const Plan& plan = *work.job.plan;
  const Scratch<Real>& scratch = work.scratch;
  for (std::int64_t j = keys.seen.lo; j < keys.seen.hi; ++j) {
    read_vector(work.job.problem->v, work.piece.b, work.piece.g, j, plan.E, false, scratch.row);
    if (all_finite(scratch.row, plan.E)) continue;
    for (int r = 0; r < strip.rows; ++r)
      if (scratch.sees[r * keys.n + j - keys.lo])
        for (std::int64_t c = 0; c < plan.E; ++c)
          acc[r * plan.padded_columns + c] +=
              Operand::weight(scratch.scores + r * plan.score_stride, j - keys.lo) * scratch.row[c];
  }
}

// --- one strip against one key block ---

// Scores of keys [from, from + n) of a packed block, whose first panel is product.k; `from` is whole vectors. Half a panel
// where no more is wanted. Calls fetch(first, end) before a tile, to prefetch the mask of its keys: all at once would be
// more than memory takes.
template <class Operand, int rows, class Fetch, class Real = typename Operand::Real>
LH_INLINE void multiply_keys(const Scoring& scoring, const ScoreProduct<Real>& product, std::int64_t from, std::int64_t n,
                             const Fetch& fetch) {
  ScoreProduct<Real> tile = product;
  for (std::int64_t j = from, end = from + n; j < end;) {
    const std::int64_t within = j % panel<Real>;
    tile.k = product.k + (j - within) * product.D + within;
    tile.s = product.s + j - from;
    fetch(j, least(j + panel<Real> - within, end));
    if (within == 0 && end - j > lanes<Real>) {
      any_score_tile<Operand, rows, 2>(scoring, tile);
      j += panel<Real>;
    } else {
      any_score_tile<Operand, rows, 1>(scoring, tile);
      j += lanes<Real>;
    }
  }
}

// Where value_tile finds the values of some keys: column c begins at data + c * panel_step.
template <class Real>
struct Values {
  const Real* data;  // of the first word
  std::int64_t row_step, panel_step;
};

// Weights times the values of words [lo, lo + n) of the block's keys. The chunks begin at fixed keys, wherever the strip
// begins, so that a row's bits do not depend on the other rows of its strip.
template <class Operand, int rows, class Real = typename Operand::Real>
LH_INLINE void multiply_values(const Plan& plan, const Real* weights, const Values<Real>& values, std::int64_t lo,
                               std::int64_t n, const Target<Real>& target, Real* acc) {
  constexpr std::int64_t chunk = value_chunk / Operand::per_word;
  Real ones[tile_rows];
  for (int r = 0; r < tile_rows; ++r) ones[r] = 1;
  for (std::int64_t c = 0; c < plan.E; c += panel<Real>)
    for (std::int64_t j = 0, end; j < n; j = end) {
      end = least(n, (lo + j) / chunk * chunk + chunk - lo);
      Target<Real> part = target;
      part.acc += c;
      part.to += c;
      if (j > 0) part.share = ones;
      if (end < n) {
        part.below = nullptr;
        part.to = acc + c;
        part.step = plan.padded_columns;
      }
      const auto tile = plan.E - c > lanes<Real> ? value_tile<Operand, rows, 2> : value_tile<Operand, rows, 1>;
      tile(weights + j, plan.score_stride, values.data + c * values.panel_step + j * values.row_step, values.row_step,
           end - j, part);
    }
}

template <class Real>
LH_INLINE void clear(const Strip& strip, const Plan& plan, Real* acc) {
  for (std::int64_t i = 0; i < strip.rows * plan.padded_columns; ++i) acc[i] = 0;
}

// Whether a tile can write the products with the last values straight to the output.
template <class Real>
LH_INLINE bool ends_in_output(const Job& job, const Strip& strip) {
  const Result& result = *job.result;
  return result.out && !result.acc && job.plan->E % lanes<Real> == 0 && lies_as_computed<Real>(result.out) &&
         tile_in_place(result.out, *job.problem, strip);
}

// Scores of a strip become weights, in words; share[r] is the factor for what row r had before.
template <class Operand, bool statistics, class Real = typename Operand::Real>
LH_INLINE void weigh(const BlockWork<Real>& work, const Strip& strip, const Stretch& keys, bool hidden, Row<Real>* rows, Real* share) {
  const Job& job = work.job;
  const int count = static_cast<int>(strip.rows);
  StripScores<Real> scores{work.scratch.scores, job.plan->score_stride, keys.n, count};
  Noted<Real> noted{job, keys.lo, hidden, {}};
  if constexpr (statistics) {  // in whole panels
    scores.n = round_up(keys.n, panel<Real>);
    noted.hidden = hidden || scores.n > keys.n;
    const std::int64_t* first_keys = job.result->first_keys;
    for (int r = 0; r < count; ++r) {
      noted.first[r] = first_keys ? first_keys[strip.b * job.problem->T + strip.t[r]] : job.origin;
      if (scores.n > keys.n) store(scores.s + r * scores.stride + keys.n, splat(-infinity<Real>));
    }
  }
  softmax_strip<statistics>(scores, noted, rows, share, [&] { fetch_ahead(work.piece.ahead, 1); });
  if (job.problem->scoring.dropout <= 0 && Operand::per_word == 1) return;
  for (int r = 0; r < count; ++r) {
    Real* s = scores.s + r * scores.stride;
    if (job.problem->scoring.dropout > 0)
      drop_row(job, strip, r, Scores<Real>{s, keys.lo, least(keys.n, job.problem->S - keys.lo)});
    Operand::make_words(s, keys.n);
  }
}

// How the product with the values is taken.
struct ValueSource {
  bool in_place;  // from the caller's array, not from the pack
  bool ends;      // it is the last, and a tile can write the output
};

// acc = share * acc + weights . values; the last time, if a tile can, divided and straight to the output.
template <class Operand, class Real = typename Operand::Real>
void add_values(const BlockWork<Real>& work, const Strip& strip, const Stretch& keys, const Real* packed, ValueSource source,
                const Real* share, Progress<Real>& progress) {
  const Job& job = work.job;
  const Plan& plan = *job.plan;
  const auto& v = job.problem->v;
  constexpr std::int64_t per_word = Operand::per_word;
  const std::int64_t from = (keys.seen.lo - keys.first) / per_word, end = (keys.seen.hi - keys.first + per_word - 1) / per_word;
  Values<Real> values{packed + from * panel<Real>, panel<Real>, plan.value_words()};
  if (source.in_place)
    values = {reinterpret_cast<const Real*>(v.at(work.piece.b, work.piece.g, keys.seen.lo)),
              v.row_stride / static_cast<std::int64_t>(sizeof(Real)), 1};
  Real* const acc = progress.acc;
  Target<Real> target{progress.begun ? share : nullptr, nullptr, acc, plan.padded_columns, acc, plan.padded_columns};
  Real below[tile_rows];
  if (source.ends) {
    const MutableTensor& out = job.result->out;
    for (int r = 0; r < tile_rows; ++r)
      below[r] = r < strip.rows ? settled_divisor(job, progress.rows[r], strip.head[r]) : Real(1);
    target.below = below;
    target.to = reinterpret_cast<Real*>(out.at(strip.b, strip.head[0], strip.t[0]));
    target.step = out.row_stride / static_cast<std::int64_t>(sizeof(Real));
    progress.written = true;
  }
  const Real* weights = work.scratch.scores + (from - (keys.lo - keys.first) / per_word);
  with_tile(strip.rows, [&](auto n_rows) {
    multiply_values<Operand, n_rows.value>(plan, weights, values, from, end - from, target, acc);
  });
}

// With `last`, no later block has keys that the strip sees.
template <class Operand, bool statistics, class Real = typename Operand::Real>
void attend_block(const BlockWork<Real>& work, const Strip& strip, Progress<Real>& progress, bool last) {
  const bool streams = Operand::per_word == 1 && work.streams;  // pairs never stream: leaves that code out
  const Job& job = work.job;
  const Piece& piece = work.piece;
  const Scratch<Real>& scratch = work.scratch;
  const Problem& problem = *job.problem;
  const Plan& plan = *job.plan;
  const Span span = visible_span(job, work.block, strip);
  if (span.lo >= span.hi) return;
  const Stretch keys = stretch_of<Real>(span, work.block * plan.key_block);
  const HeadRows rows{piece.b, piece.g, keys.lo, keys.real()};
  const std::int64_t slot = work.block - work.packed.first_block;
  Real* room = static_cast<Real*>(work.packed.data) + slot * plan.pack_words();
  Real scale[tile_rows], share[whole_rows<Real>];
  for (int r = 0; r < tile_rows; ++r) scale[r] = static_cast<Real>(strip.scale[r]);

  fetch_ahead(piece.ahead, product_steps);
  if (streams) {
    stream_keys(job, rows, LineScores<Real>{progress.q, strip.rows, plan.D, scale, scratch.scores, plan.score_stride}, scratch.row);
  } else {
    const ScoreProduct<Real> product{progress.q, progress.q_step, room, plan.key_words, plan.score_chunk,
                                     scale, scratch.scores, plan.score_stride};
    with_tile(strip.rows, [&](auto n_rows) {
      multiply_keys<Operand, n_rows.value>(problem.scoring, product, keys.lo - keys.first, keys.real(),
                                           [&](std::int64_t from, std::int64_t to) {
                                             fetch_mask(problem.scoring.mask, strip, keys.first + from, keys.first + to);
                                           });
    });
  }
  const bool hidden = score_strip(job, strip, span, Scores<Real>{scratch.scores, keys.lo, keys.n}, scratch.row);

  bool tainted = !streams && problem.v && work.packed.tainted[slot];
  // Whether streamed values are finite is known only afterwards; for few rows this costs nothing.
  if (streams || tainted) note_visible(strip, scratch.scores, plan.score_stride, keys.n, scratch.sees);
  weigh<Operand, statistics>(work, strip, keys, hidden, progress.rows, share);
  if (!problem.v) return;

  fetch_ahead(piece.ahead, product_steps);
  if (streams) {
    if (!progress.begun) clear(strip, plan, progress.acc);
    const LineWeights<Real> weights{scratch.scores, strip.rows, plan.score_stride, scratch.part, plan.padded_columns};
    tainted = !stream_values(job, keys.first, rows, weights, share, room, progress.acc);
  } else {
    const ValueSource source{!tainted && values_in_place<Real>(problem), last && !tainted && ends_in_output<Real>(job, strip)};
    add_values<Operand>(work, strip, keys, room + plan.key_block * plan.key_words, source, share, progress);
  }
  progress.begun = true;
  if (tainted) add_tainted<Operand>(work, strip, keys, progress.acc);
}

// --- a piece of work ---

template <class Real>
void fold(const Job& job, const Partials& partials, const QueryRow& row, void* memory) {
  const Plan& plan = *job.plan;
  const Scratch<Real> scratch(plan, memory);
  const std::int64_t slot = row_index(*job.problem, row) * plan.splits;
  const Row<Real>* rows = reinterpret_cast<const Row<Real>*>(partials.rows) + slot;
  const Real* acc = reinterpret_cast<const Real*>(partials.acc) + slot * plan.E;
  Row<Real> total;
  for (std::int64_t c = 0; c < plan.E; ++c) scratch.acc[c] = 0;
  for (std::int64_t split = 0; split < plan.splits; ++split, acc += plan.E) {
    const Share<Real> share = merge(total, rows[split]);
    if (share.b == 0) continue;  // nothing seen there, nothing to add
    for (std::int64_t c = 0; c < plan.E; ++c) scratch.acc[c] = fused(scratch.acc[c], share.a, acc[c] * share.b);
  }
  write_row(job, row, total, scratch.acc, false, scratch.row);
}

template <class Real>
void end_strip(const Job& job, const Piece& piece, const Strip& strip, const Progress<Real>& progress, Real* spare) {
  const std::int64_t stride = job.plan->padded_columns;
  if (!progress.begun) clear(strip, *job.plan, progress.acc);
  if (progress.written && !job.result->sums && !job.result->logsumexp) return;
  for (int r = 0; r < strip.rows; ++r) {
    const QueryRow row{strip.b, strip.head[r], strip.t[r]};
    const Real* acc = progress.acc + r * stride;
    if (piece.partials)
      keep_partial(job, *piece.partials, row_index(*job.problem, row) * job.plan->splits + piece.split, progress.rows[r], acc);
    else
      write_row(job, row, progress.rows[r], acc, progress.written, spare);
  }
}

template <class Operand, bool statistics, class Real = typename Operand::Real>
void attend_rows(const Job& job, const Packed& packed, const Piece& piece, const Worker& worker) {
  const Plan& plan = *job.plan;
  const Scratch<Real> scratch(plan, worker.scratch);
  const std::int64_t count = piece.row1 - piece.row0, strips = (count + tile_rows - 1) / tile_rows;
  const bool streams = packed.on_demand && plan.streams;
  std::int64_t first = piece.block1, last = piece.block0;  // key blocks that some strip can see
  for (std::int64_t i = 0; i < strips; ++i) {
    Strip& strip = scratch.strips[i];
    make_strip(job, piece, piece.row0 + i * tile_rows, strip);
    scratch.progress[i] = begin_strip<Operand>(job, strip, i, streams, scratch);
    first = least(first, strip.first / plan.key_block);
    last = most(last, (strip.last + plan.key_block - 1) / plan.key_block);
  }
  for (std::int64_t i = 0; i < count; ++i) scratch.rows[i] = Row<Real>{};

  const std::int64_t end = least(last, piece.block1);
  for (std::int64_t block = most(first, piece.block0); block < end; ++block) {
    Packed here = packed;
    if (packed.on_demand) here.first_block = block;
    if (packed.on_demand && !streams) pack<Operand>(job, piece.b, piece.g, block, here, scratch.row);
    const BlockWork<Real> work{job, piece, here, scratch, block, streams};
    for (std::int64_t i = 0; i < strips; ++i) {
      const Strip& strip = scratch.strips[i];
      const bool ends = !piece.partials && (block + 1 == end || strip.last <= (block + 1) * plan.key_block);
      attend_block<Operand, statistics>(work, strip, scratch.progress[i], ends);
    }
    if (block + 1 < end && interrupted(*job.interrupt, worker.number)) return;
  }
  for (std::int64_t i = 0; i < strips; ++i) end_strip(job, piece, scratch.strips[i], scratch.progress[i], scratch.row);
}

template <class Operand>
void attend(const Job& job, const Packed& packed, const Piece& piece, const Worker& worker) {
  if (job.result->sums) return attend_rows<Operand, true>(job, packed, piece, worker);
  attend_rows<Operand, false>(job, packed, piece, worker);
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

template <class Operand, class Real = typename Operand::Real>
constexpr KernelTable table_for = {{tile_rows, panel<Real>, Operand::per_word},
                                   scratch_bytes<Real>,
                                   sizeof(Row<Real>),
                                   pack<Operand>,
                                   attend<Operand>,
                                   fold<Real>,
                                   finish_rows<Real>,
                                   exponentials<Real>};

}  // namespace
}  // namespace levelhead

#define LEVELHEAD_KERNEL(isa)                                                                                              \
  extern "C" const levelhead::NumberTables levelhead_kernel_##isa = {                                                      \
      levelhead::table_for<levelhead::Numbers<float>>, levelhead::table_for<levelhead::Numbers<double>>,                  \
      levelhead::gradients_for<float>, levelhead::gradients_for<double>, levelhead::burn, levelhead::sweep}
