// The algorithm, once: query rows of one kv head against the keys they see, in one pass.
//
//   for each key block (packed K and V stay in L2)
//     for each strip of tile_rows query rows (its scores stay in L1)
//       scores of the keys the strip can see   -> score_tile, score_strip
//       2^(s - m), sums, statistics            -> softmax_row
//       acc = share * acc + weights . V        -> value_tile
//   output = acc / denominator               -> in the last value_tile, or write_row
//
// Included by each isa_*.cpp, which sets LEVELHEAD_VECTOR_BYTES, LEVELHEAD_TILE_ROWS and the table's name.
#pragma once

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
  bool begun, written;  // whether acc holds something; whether the output is where it belongs
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
    // First, because pack() uses it alone: `lanes` keys and one more there, `lanes` in stream_keys, a value, a row of bias.
    carve(row, most(most(plan.D * (lanes<Real> + 1), plan.E), plan.key_block));
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

// Whether the rows of a strip fill a tile and lie evenly: then a tile can work on them in place, if they lie in words.
template <class Array>
LH_INLINE bool tile_in_place(const Array& x, const Problem& problem, const Strip& strip) {
  return strip.rows == rows_of_tile(strip.rows) &&
         (strip.head[0] == strip.head[strip.rows - 1] || x.head_stride == problem.T * x.row_stride);
}

// Queries of a strip: in place, or one after another in `room`, where those beyond the last are zero.
template <class Operand, class Real = typename Operand::Real>
Progress<Real> begin_strip(const Job& job, const Strip& strip, std::int64_t b, bool streams, Real* room) {
  const Problem& problem = *job.problem;
  const std::int64_t D = job.plan->key_words;
  if (!streams && !problem.scoring.cosine && Operand::lies_in_words(problem.q, problem.D) &&
      tile_in_place(problem.q, problem, strip))
    return {reinterpret_cast<const Real*>(problem.q.at(b, strip.head[0], strip.t[0])),
            problem.q.row_stride / static_cast<std::int64_t>(sizeof(Real)), false, false};
  Real* q = room;
  for (int r = 0; r < tile_rows; ++r, q += D) {
    if (r < strip.rows) {
      Operand::read_words(problem.q, b, strip.head[r], strip.t[r], problem.D, problem.scoring.cosine, q);
    } else {
      for (std::int64_t d = 0; d < D; ++d) q[d] = 0;
    }
  }
  return {room, D, false, false};
}

// --- values that are not finite: zero in the pack, added by hand to the rows that see them ---

template <class Real>
void note_visible(const Strip& strip, const Real* scores, std::int64_t stride, std::int64_t n, std::uint8_t* sees) {
  for (int r = 0; r < strip.rows; ++r)
    for (std::int64_t j = 0; j < n; ++j) sees[r * n + j] = scores[r * stride + j] != -infinity<Real>;
}

template <class Operand, class Real = typename Operand::Real>
void add_tainted(const Job& job, const Strip& strip, const Span& span, std::int64_t b, std::int64_t g,
                 const Scratch<Real>& scratch, std::int64_t lo, std::int64_t n, Real* acc) {
  const Plan& plan = *job.plan;
  for (std::int64_t j = span.lo; j < span.hi; ++j) {
    read_vector(job.problem->v, b, g, j, plan.E, false, scratch.row);
    if (all_finite(scratch.row, plan.E)) continue;
    for (int r = 0; r < strip.rows; ++r)
      if (scratch.sees[r * n + j - lo])
        for (std::int64_t c = 0; c < plan.E; ++c)
          acc[r * plan.padded_columns + c] +=
              Operand::weight(scratch.scores + r * plan.score_stride, j - lo) * scratch.row[c];
  }
}

// --- one strip against one key block ---

// Scores of keys [from, from + n) of a packed block; `from` is whole vectors. Half a panel where no more is wanted.
// Before a tile the mask of its keys is asked for, which all at once would be more than memory takes.
template <class Operand, int rows, class Fetch, class Real = typename Operand::Real>
LH_INLINE void multiply_keys(const Scoring& scoring, const Plan& plan, const Progress<Real>& strip, const Real* keys, std::int64_t from,
                             std::int64_t n, const Real* scale, Real* s, const Fetch& fetch) {
  const std::int64_t D = plan.key_words, chunk = plan.score_chunk, stride = plan.score_stride;
  for (std::int64_t j = from, end = from + n; j < end;) {
    const std::int64_t within = j % panel<Real>;
    const Real* k = keys + (j - within) * D + within;
    fetch(j, least(j + panel<Real> - within, end));
    if (within == 0 && end - j > lanes<Real>) {
      any_score_tile<Operand, rows, 2>(scoring, strip.q, strip.q_step, k, D, chunk, scale, s + j - from, stride);
      j += panel<Real>;
    } else {
      any_score_tile<Operand, rows, 1>(scoring, strip.q, strip.q_step, k, D, chunk, scale, s + j - from, stride);
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
// begins, so that a row's bits do not depend on its neighbours.
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

// Where the products with the last values go: straight to the output when a tile can.
template <class Real>
LH_INLINE bool ends_in_output(const Job& job, const Strip& strip) {
  const Result& result = *job.result;
  return result.out && !result.acc && job.plan->E % lanes<Real> == 0 && lies_as_computed<Real>(result.out) &&
         tile_in_place(result.out, *job.problem, strip);
}

// The keys of a block that a strip sees and those it computes: from the vector where these begin, on
// to whole panels; what lies beyond the last is hidden.
struct Stretch {
  std::int64_t first, lo, n;  // the block's first key, the first computed, how many
  Span seen;

  LH_INLINE std::int64_t real() const { return seen.hi - lo; }
};

template <class Real>
LH_INLINE Stretch stretch_of(const Span& span, std::int64_t first) {
  const std::int64_t lo = first + (span.lo - first) / lanes<Real> * lanes<Real>;
  return {first, lo, round_up(span.hi - lo, panel<Real>), span};
}

// Scores of a strip become weights, in words; share[r] is what is left of what row r had before.
template <class Operand, bool statistics, class Real = typename Operand::Real>
LH_INLINE void weigh(const Job& job, const Strip& strip, const Piece& piece, const Stretch& keys, bool hidden, Real* scores,
                     Row<Real>* rows, Real* share) {
  for (int r = 0; r < tile_rows; ++r) share[r] = 1;
  for (int r = 0; r < strip.rows; ++r) {
    Real* s = scores + r * job.plan->score_stride;
    share[r] = softmax_row<Real, statistics>(job, s, keys.lo, keys.n, hidden, rows[r]);
    fetch_ahead(piece.ahead, 1);
    if (job.problem->scoring.dropout > 0)
      drop_row(job, piece.b, strip.head[r], strip.position[r], s, keys.lo, least(keys.n, job.problem->S - keys.lo));
    Operand::make_words(s, keys.n);
  }
}

// acc = share * acc + weights . values; the last time, if a tile can, divided and straight to the output.
template <class Operand, class Real = typename Operand::Real>
void add_values(const Job& job, const Strip& strip, const Piece& piece, const Stretch& keys, const Real* packed,
                bool in_place, bool ends, const Real* weights, const Real* share, Progress<Real>& progress,
                Row<Real>* rows, Real* acc) {
  const Plan& plan = *job.plan;
  const auto& v = job.problem->v;
  constexpr std::int64_t per_word = Operand::per_word;
  const std::int64_t from = (keys.seen.lo - keys.first) / per_word, end = (keys.seen.hi - keys.first + per_word - 1) / per_word;
  Values<Real> values{packed + from * panel<Real>, panel<Real>, plan.value_words()};
  if (in_place)
    values = {reinterpret_cast<const Real*>(v.at(piece.b, piece.g, keys.seen.lo)),
              v.row_stride / static_cast<std::int64_t>(sizeof(Real)), 1};
  Target<Real> target{progress.begun ? share : nullptr, nullptr, acc, plan.padded_columns, acc, plan.padded_columns};
  Real below[tile_rows];
  if (ends) {
    const MutableTensor& out = job.result->out;
    for (int r = 0; r < tile_rows; ++r) below[r] = r < strip.rows ? settled_divisor(job, rows[r], strip.head[r]) : Real(1);
    target.below = below;
    target.to = reinterpret_cast<Real*>(out.at(piece.b, strip.head[0], strip.t[0]));
    target.step = out.row_stride / static_cast<std::int64_t>(sizeof(Real));
    progress.written = true;
  }
  with_tile(strip.rows, [&](auto n_rows) {
    multiply_values<Operand, n_rows.value>(plan, weights + (from - (keys.lo - keys.first) / per_word), values, from, end - from,
                                           target, acc);
  });
}

template <class Operand, bool statistics, class Real = typename Operand::Real>
void attend_block(const Job& job, const Packed& packed, bool streams, const Strip& strip, const Piece& piece,
                  std::int64_t block, bool last, const Scratch<Real>& scratch, Progress<Real>& progress, Row<Real>* rows,
                  Real* acc) {
  if constexpr (Operand::per_word > 1) streams = false;  // never is; so the code for it is left out
  const Problem& problem = *job.problem;
  const Plan& plan = *job.plan;
  const Span span = visible_span(job, piece.b, block, strip);
  if (span.lo >= span.hi) return;
  const Stretch keys = stretch_of<Real>(span, block * plan.key_block);
  Real* room = static_cast<Real*>(packed.data) + (block - packed.first_block) * plan.pack_words();
  Real scale[tile_rows], share[tile_rows];
  for (int r = 0; r < tile_rows; ++r) scale[r] = static_cast<Real>(strip.scale[r]);

  fetch_ahead(piece.ahead, product_steps);
  if (streams)
    stream_keys(job, piece.b, piece.g, keys.lo, keys.real(), progress.q, strip.rows, scale, scratch.scores, scratch.row);
  else
    with_tile(strip.rows, [&](auto n_rows) {
      multiply_keys<Operand, n_rows.value>(
          problem.scoring, plan, progress, room, keys.lo - keys.first, keys.real(), scale, scratch.scores,
          [&](std::int64_t from, std::int64_t to) {
            fetch_mask(problem.scoring.mask, strip, piece.b, keys.first + from, keys.first + to);
          });
    });
  const bool hidden = score_strip(job, strip, span, piece.b, scratch.scores, keys.lo, keys.n, scratch.row);

  bool tainted = !streams && problem.v && packed.tainted[block - packed.first_block];
  // Streamed values show only afterwards whether they are finite; a look at few rows costs nothing.
  if (streams || tainted) note_visible(strip, scratch.scores, plan.score_stride, keys.n, scratch.sees);
  weigh<Operand, statistics>(job, strip, piece, keys, hidden, scratch.scores, rows, share);
  if (!problem.v) return;

  fetch_ahead(piece.ahead, product_steps);
  if (streams) {
    if (!progress.begun) clear(strip, plan, acc);
    tainted = !stream_values(job, piece.b, piece.g, keys.first, keys.lo, keys.real(), scratch.scores, strip.rows, share,
                             scratch.part, room, acc);
  } else {
    add_values<Operand>(job, strip, piece, keys, room + plan.key_block * plan.key_words,
                        !tainted && values_in_place<Real>(problem), last && !tainted && ends_in_output<Real>(job, strip),
                        scratch.scores, share, progress, rows, acc);
  }
  progress.begun = true;
  if (tainted) add_tainted<Operand>(job, strip, span, piece.b, piece.g, scratch, keys.lo, keys.n, acc);
}

// --- a piece of work ---

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
  write_row(job, total, scratch.acc, false, b, head, t, scratch.row);
}

template <class Real>
void end_strip(const Job& job, const Strip& strip, const Progress<Real>& progress, const Piece& piece,
               const Partials* partials, std::int64_t split, Row<Real>* rows, Real* acc, Real* spare) {
  const std::int64_t stride = job.plan->padded_columns;
  if (!progress.begun) clear(strip, *job.plan, acc);
  if (progress.written && !job.result->sums && !job.result->logsumexp) return;
  for (int r = 0; r < strip.rows; ++r) {
    const std::int64_t head = strip.head[r], t = strip.t[r];
    if (partials)
      keep_partial(job, *partials, row_index(*job.problem, piece.b, head, t) * job.plan->splits + split, rows[r],
                   acc + r * stride);
    else
      write_row(job, rows[r], acc + r * stride, progress.written, piece.b, head, t, spare);
  }
}

template <class Operand, bool statistics, class Real = typename Operand::Real>
void attend_rows(const Job& job, const Packed& packed, bool packs, const Piece& piece, const Partials* partials,
                 std::int64_t split, int worker, void* memory) {
  const Plan& plan = *job.plan;
  const Scratch<Real> scratch(plan, memory);
  const std::int64_t count = piece.row1 - piece.row0, strips = (count + tile_rows - 1) / tile_rows;
  const bool streams = packs && plan.streams;
  std::int64_t first = piece.block1, last = piece.block0;  // key blocks that some strip can see
  for (std::int64_t i = 0; i < strips; ++i) {
    Strip& strip = scratch.strips[i];
    make_strip(job, piece, piece.row0 + i * tile_rows, strip);
    scratch.progress[i] = begin_strip<Operand>(job, strip, piece.b, streams, scratch.q + i * tile_rows * plan.key_words);
    first = least(first, strip.first / plan.key_block);
    last = most(last, (strip.last + plan.key_block - 1) / plan.key_block);
  }
  for (std::int64_t i = 0; i < count; ++i) scratch.rows[i] = Row<Real>{};

  const std::int64_t end = least(last, piece.block1);
  for (std::int64_t block = most(first, piece.block0); block < end; ++block) {
    Packed here = packed;
    if (packs) here.first_block = block;
    if (packs && !streams) pack<Operand>(job, piece.b, piece.g, block, here, scratch.row);
    for (std::int64_t i = 0; i < strips; ++i) {
      const Strip& strip = scratch.strips[i];
      const bool ends = !partials && (block + 1 == end || strip.last <= (block + 1) * plan.key_block);
      attend_block<Operand, statistics>(job, here, streams, strip, piece, block, ends, scratch, scratch.progress[i],
                                        scratch.rows + i * tile_rows, scratch.acc + i * tile_rows * plan.padded_columns);
    }
    if (block + 1 < end && interrupted(*job.interrupt, worker)) return;
  }
  for (std::int64_t i = 0; i < strips; ++i)
    end_strip(job, scratch.strips[i], scratch.progress[i], piece, partials, split, scratch.rows + i * tile_rows,
              scratch.acc + i * tile_rows * plan.padded_columns, scratch.row);
}

template <class Operand>
void attend(const Job& job, const Packed& packed, bool packs, const Piece& piece, const Partials* partials,
            std::int64_t split, int worker, void* memory) {
  if (job.result->sums) return attend_rows<Operand, true>(job, packed, packs, piece, partials, split, worker, memory);
  attend_rows<Operand, false>(job, packed, packs, piece, partials, split, worker, memory);
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
