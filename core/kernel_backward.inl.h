// The backward pass: weights are recomputed from the logsumexp, a block of queries by a block of keys at a time, in five products.
//
//   for each key block of a slice (packed K, Kᵀ, Vᵀ and the sums dK, dV stay in L2)
//     for each block of query rows
//       s = scores, p = 2^(s - lse), ds = p (dout Vᵀ - delta)     -> score_tile twice, differentiate
//       dq += ds K                                               -> value_tile, into the slice's own part
//       dk += dsᵀ q, dv += pᵀ dout                                 -> value_tile, turned
//
// Zero times what is not finite is NaN. So rows that are not finite are replaced by zeros in every product where their
// weight may be zero; where it is not zero, ds or p is NaN anyway. Part of kernel.inl.h.
#pragma once

#include "kernel_additive.inl.h"
#include "kernel_backward_pack.inl.h"

namespace levelhead {
namespace {

// --- one strip against one key block: p and ds ---

// s (scored) and dp (dout . v) of one row become p and ds.
template <class Real>
LH_INLINE void differentiate(Real* s, Real* dp, std::int64_t n, const Real* lse, Real delta) {
  const Vector<Real> nothing = splat(-infinity<Real>), zero{};
  for (std::int64_t j = 0; j < n; j += panel<Real>) {
    const Vector<Real> logit[2] = {load(s + j), load(s + j + lanes<Real>)};
    const Vector<Real> x[2] = {cut_off<Real>((logit[0] - lse[0]) - lse[1]), cut_off<Real>((logit[1] - lse[0]) - lse[1])};
    Vector<Real> e[2];
    exp2_flushed<Real, 2>(x, e);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const std::int64_t at = j + half * lanes<Real>;
      const Integers<Real> seen = logit[half] != nothing;
      store(s + at, select(seen, e[half], zero));
      store(dp + at, select(seen, e[half] * (load(dp + at) - delta), zero));
    }
  }
}

// 1 - tanh(x)^2 for x = s / cap, before it is capped.
template <class Real>
LH_INLINE void softcap_slopes(const Real* s, std::int64_t n, Real* slope) {
  for (std::int64_t j = 0; j < n; j += lanes<Real>) {
    const Vector<Real> t = tanh<Real>(load(s + j));
    store(slope + j, (Real(1) - t) * (Real(1) + t));
  }
}

template <class Real>
void add_to_bias(const MutableTensor& dmask, const Strip& strip, int r, const Scores<Real>& ds) {
  char* to = dmask.at(strip.b, strip.head[r], strip.t[r]) + ds.lo * dmask.column_stride;
  for (std::int64_t j = 0; j < ds.n; ++j, to += dmask.column_stride) *reinterpret_cast<Real*>(to) += ds.s[j];
}

// The columns of a block a strip computes: whole panels around its span.
template <class Real>
LH_INLINE Span columns_of(const Span& span, std::int64_t first) {
  constexpr int width = panel<Real>;
  return {(span.lo - first) / width * width, round_up(span.hi - first, width), span.hide, span.segments};
}

// One key block of a slice, against all query rows of its kv head in turn.
template <class Real>
struct GradientBlock {
  const Job& job;
  const Backward& backward;
  const GradientScratch<Real>& scratch;  // the block's keys, packed, and their sums
  std::int64_t block, first;             // its number, its first key
  Real* dq;                              // the slice's part, from the kv head's first row on
  bool begun;                            // whether the part holds something
};

// A strip against that block.
template <class Real>
struct GradientStrip {
  const Strip& strip;
  Span span, columns;    // keys it sees; columns it computes
  const Real *q, *dout;  // packed
  Real *p, *ds;          // rows score_stride apart
  Real* dq;              // its rows of the slice's part
};

template <class Real>
void gradient_strip(const GradientBlock<Real>& block, const GradientStrip<Real>& of) {
  const Job& job = block.job;
  const Backward& backward = block.backward;
  const GradientScratch<Real>& scratch = block.scratch;
  const Strip& strip = of.strip;
  const Problem& problem = *job.problem;
  const Plan& plan = *job.plan;
  const std::int64_t stride = plan.score_stride, first = block.first;
  const std::int64_t lo = of.columns.lo, hi = of.columns.hi, n = hi - lo;
  Real *const p = of.p, *const ds = of.ds;
  Real scale[tile_rows], ones[tile_rows];
  for (int r = 0; r < tile_rows; ++r) {
    scale[r] = static_cast<Real>(strip.scale[r]);
    ones[r] = 1;
  }
  with_tile(strip.rows, [&](auto rows) {
    for (std::int64_t j = lo; j < hi; j += panel<Real>) {
      any_score_tile<Numbers<Real>, rows.value, 2>(
          problem.scoring, {of.q, plan.D, scratch.keys + j * plan.D, plan.D, plan.score_chunk, scale, p + j, stride});
      score_tile<Numbers<Real>, rows.value, 2>(
          {of.dout, plan.E, scratch.values + j * plan.E, plan.E, backward.value_chunk, ones, ds + j, stride});
    }
  });
  const double cap = problem.scoring.softcap;
  for (int r = 0; cap > 0 && r < strip.rows; ++r) softcap_slopes(p + r * stride + lo, n, scratch.slope + r * stride);
  score_strip(job, strip, of.span, Scores<Real>{p + lo, first + lo, n}, scratch.row);
  const std::int64_t real = least(n, problem.S - first - lo);
  for (int r = 0; r < strip.rows; ++r) {
    const std::int64_t index = row_index(problem, {strip.b, strip.head[r], strip.t[r]});
    Real *s = p + r * stride + lo, *d = ds + r * stride + lo;
    if (strip.dead[r]) {
      for (std::int64_t j = 0; j < n; ++j) s[j] = d[j] = 0;
      continue;
    }
    const auto drop = [&](Real* x) {
      if (problem.scoring.dropout > 0) drop_row(job, strip, r, Scores<Real>{x, first + lo, real});
    };
    drop(d);
    differentiate(s, d, n, static_cast<const Real*>(backward.lse) + 2 * index, static_cast<const Real*>(backward.delta)[index]);
    drop(s);
    if (backward.given->dmask) add_to_bias(backward.given->dmask, strip, r, Scores<Real>{d, first + lo, real});
    // A hidden key may hold NaN, and then its slope is NaN too: zero must stay zero.
    for (std::int64_t j = 0; cap > 0 && j < n; j += lanes<Real>) {
      const Vector<Real> x = load(d + j), zero{};
      store(d + j, select(x != zero, x * load(scratch.slope + r * stride + j), zero));
    }
  }
}

// --- the products ---

// Terms of a sum that are taken in one go (as in plan.h): with 96 the maximal error of dv would be above PyTorch's.
constexpr std::int64_t gradient_chunk = 48;

// left (rows x n; n x rows if turned) . right (n x columns, in panels of columns `height` high).
template <class Real>
struct Product {
  std::int64_t rows, n, columns;
  const Real* left;
  std::int64_t stride;  // between the rows of `left`
  const Real* right;
  std::int64_t height;
};

// to (rows x columns, whole panels apart) += the product. What was there before counts only if it has `begun`.
template <class Real, bool turned>
LH_INLINE void add_product(bool begun, const Product<Real>& product, Real* to) {
  const std::int64_t n = product.n, columns = product.columns, stride = product.stride, height = product.height;
  const Real *left = product.left, *right = product.right;
  Real ones[tile_rows];
  for (int r = 0; r < tile_rows; ++r) ones[r] = 1;
  const std::int64_t wide = padded<Real>(columns), step = turned ? stride : 1;
  with_tile(product.rows, [&](auto count) {
    for (std::int64_t c = 0; c < columns; c += panel<Real>) {
      Target<Real> target{begun ? ones : nullptr, nullptr, to + c, wide, to + c, wide};
      const auto tile = columns - c > lanes<Real> ? value_tile<Numbers<Real>, count.value, 2, turned>
                                                  : value_tile<Numbers<Real>, count.value, 1, turned>;
      for (std::int64_t j = 0; j < n; j += gradient_chunk, target.share = ones)
        tile(left + j * step, stride, right + c * height + j * panel<Real>, panel<Real>, least(gradient_chunk, n - j), target);
    }
  });
}

// dk and dv of the block, from the rows that see some key of a tile.
template <class Real>
void add_key_gradients(const GradientBlock<Real>& block, const Queries<Real>& queries, std::int64_t strips, std::int64_t rows) {
  const GradientScratch<Real>& scratch = block.scratch;
  const Gradients& given = *block.backward.given;
  const Problem& problem = *block.job.problem;
  const Plan& plan = *block.job.plan;
  const std::int64_t first = block.first, count = least(plan.key_block, problem.S - first);
  for (std::int64_t key = 0; key < count; key += tile_rows) {
    const std::int64_t keys = least(tile_rows, count - key);
    std::int64_t begin = strips, end = 0;
    for (std::int64_t i = 0; i < strips; ++i)
      if (scratch.spans[i].lo < first + key + keys && scratch.spans[i].hi > first + key) {
        begin = least(begin, i);
        end = i + 1;
      }
    if (begin >= end) continue;
    const std::int64_t from = begin * tile_rows, n = least(rows, end * tile_rows) - from, at = from * plan.score_stride + key;
    if (given.dk && !problem.scoring.additive)
      add_product<Real, true>(true,
                              {keys, n, plan.D, scratch.ds + at, plan.score_stride, queries.q_rows + from * panel<Real>,
                               plan.query_block},
                              scratch.dk + key * padded<Real>(plan.D));
    if (given.dv)
      add_product<Real, true>(true,
                              {keys, n, plan.E, scratch.p + at, plan.score_stride, queries.dout_rows + from * panel<Real>,
                               plan.query_block},
                              scratch.dv + key * padded<Real>(plan.E));
  }
}

// The same for additive attention: dq of the strip and dw of the slice, and dk in the memory of the keys' rows.
template <class Real>
void differentiate_additive(const GradientBlock<Real>& block, const GradientStrip<Real>& of) {
  const Plan& plan = *block.job.plan;
  const std::int64_t wide = padded<Real>(plan.D);
  const Real* weights = static_cast<const Real*>(block.job.problem->scoring.additive);
  additive_gradient<Real>({of.strip.rows, plan.D, of.q, block.scratch.keys, weights, of.ds, plan.score_stride, of.columns.lo,
                           of.columns.hi, of.dq, wide, block.scratch.key_rows, block.dq + block.backward.rows * wide});
}

// Copies dk of a block from there.
template <class Real>
void unpack_additive(const Job& job, std::int64_t count, const GradientScratch<Real>& scratch) {
  const std::int64_t A = job.plan->D, width = panel<Real>;
  const Real* weights = static_cast<const Real*>(job.problem->scoring.additive);
  for (std::int64_t j = 0; j < count; ++j)
    for (std::int64_t a = 0; a < A; ++a)
      scratch.dk[j * padded<Real>(A) + a] = weights[a] * scratch.key_rows[j / width * width * A + a * width + j % width];
}

// Clears p and ds beside the computed columns: add_key_gradients reads them too.
template <class Real>
LH_INLINE void clear_beside(const Plan& plan, const Span& columns, std::int64_t rows, Real* p, Real* ds) {
  for (std::int64_t r = 0; r < rows; ++r, p += plan.score_stride, ds += plan.score_stride) {
    for (std::int64_t j = 0; j < columns.lo; ++j) p[j] = ds[j] = 0;
    for (std::int64_t j = columns.hi; j < plan.key_block; ++j) p[j] = ds[j] = 0;
  }
}

// Rows [row0, row1) of the kv head against one key block.
template <class Real>
void gradient_rows(const GradientBlock<Real>& block, const Queries<Real>& queries, std::int64_t row0, std::int64_t row1) {
  const Job& job = block.job;
  const GradientScratch<Real>& scratch = block.scratch;
  const Plan& plan = *job.plan;
  const std::int64_t rows = row1 - row0, strips = (rows + tile_rows - 1) / tile_rows;
  const std::int64_t first = block.first, stride = plan.score_stride, wide = padded<Real>(plan.D);
  const bool additive = job.problem->scoring.additive, parts = block.backward.parts;
  bool visible = false;
  for (std::int64_t i = 0; i < strips; ++i) {
    const Strip& strip = queries.strips[i];
    const Span span = scratch.spans[i] = visible_span(job, block.block, strip);
    visible = visible || span.lo < span.hi;
    if (parts && !block.begun && (additive || span.lo >= span.hi))
      for (std::int64_t c = 0; c < strip.rows * wide; ++c) block.dq[(row0 + i * tile_rows) * wide + c] = 0;
  }
  if (!visible) return;
  for (std::int64_t i = 0; i < strips; ++i) {
    const Strip& strip = queries.strips[i];
    const Span& span = scratch.spans[i];
    Real *p = scratch.p + i * tile_rows * stride, *ds = scratch.ds + i * tile_rows * stride;
    if (span.lo >= span.hi) {
      clear_beside(plan, {0, 0, false, false}, strip.rows, p, ds);
      continue;
    }
    const Span columns = columns_of<Real>(span, first);
    const GradientStrip<Real> of{strip, span, columns, queries.q + i * tile_rows * plan.D, queries.dout + i * tile_rows * plan.E,
                                 p, ds, block.dq + (row0 + i * tile_rows) * wide};
    gradient_strip(block, of);
    clear_beside(plan, columns, strip.rows, p, ds);
    if (additive)
      differentiate_additive(block, of);
    else if (parts)
      add_product<Real, false>(block.begun,
                               {strip.rows, span.hi - first - columns.lo, plan.D, ds + columns.lo, stride,
                                scratch.key_rows + columns.lo * panel<Real>, plan.key_block},
                               of.dq);
  }
  add_key_gradients(block, queries, strips, rows);
}

// --- tasks ---

// Every `splits`-th key block of a kv head, from block `slice` on, against all its query rows: dk and dv are whole then,
// dq is the slice's part.
template <class Real>
void gradient_slice(const Job& job, const Backward& backward, const Piece& head, std::int64_t slice, const void* packed,
                    void* part, const Worker& worker) {
  const Problem& problem = *job.problem;
  const Plan& plan = *job.plan;
  const std::int64_t b = head.b, g = head.g;
  const GradientScratch<Real> scratch(plan, worker.scratch);
  const std::int64_t rows = backward.rows, wide_d = padded<Real>(plan.D), bytes = query_bytes<Real>(plan);
  char* queries = static_cast<char*>(const_cast<void*>(packed));
  Real* dq = static_cast<Real*>(part);
  for (std::int64_t i = 0; backward.parts && i < wide_d; ++i) dq[rows * wide_d + i] = 0;
  for (std::int64_t block = slice; block < plan.blocks; block += plan.splits) {
    const std::int64_t first = block * plan.key_block, count = least(plan.key_block, problem.S - first);
    if (problem.scoring.has_queries(b) || problem.scoring.additive) pack_gradient_keys(job, b, g, block, scratch);
    for (std::int64_t i = 0; i < round_up(count, tile_rows) * wide_d; ++i) scratch.dk[i] = 0;
    for (std::int64_t i = 0; i < round_up(count, tile_rows) * padded<Real>(plan.E); ++i) scratch.dv[i] = 0;
    const GradientBlock<Real> here{job, backward, scratch, block, first, dq, block != slice};
    for (std::int64_t row = 0; row < rows; row += plan.query_block) {
      if (interrupted(*job.interrupt, worker.number)) return;
      gradient_rows(here, Queries<Real>(plan, queries + row / plan.query_block * bytes), row, least(row + plan.query_block, rows));
    }
    if (problem.scoring.additive) unpack_additive(job, count, scratch);
    const HeadRows keys{b, g, first, count};
    write_gradients(backward.given->dk, problem.scoring.cosine ? &problem.k : nullptr, keys, plan.D, scratch.dk, scratch.row);
    write_gradients<Real>(backward.given->dv, nullptr, keys, plan.E, scratch.dv, scratch.row);
  }
}

// dq of some rows of a kv head: the parts of all slices added in order, scaled. And of the scale, row by row:
// d(scale) = q . (ds K).
template <class Real>
void gradient_fold(const Job& job, const Backward& backward, const Piece& rows, const void* packed, const DqParts& parts,
                   void* memory) {
  const Problem& problem = *job.problem;
  const Plan& plan = *job.plan;
  const std::int64_t b = rows.b, row0 = rows.row0;
  const GradientScratch<Real> scratch(plan, memory);
  const std::int64_t wide = padded<Real>(plan.D);
  const Queries<Real> queries(plan, const_cast<void*>(packed));
  Real* total = scratch.dk;
  for (std::int64_t row = row0; row < rows.row1; ++row) {
    const Strip& strip = queries.strips[(row - row0) / tile_rows];
    const int r = static_cast<int>((row - row0) % tile_rows);
    for (std::int64_t c = 0; c < wide; ++c) total[c] = 0;
    for (std::int64_t slice = 0; slice < plan.splits; ++slice) {
      const Real* part = reinterpret_cast<const Real*>(static_cast<const char*>(parts.data) + slice * parts.bytes) + row * wide;
      for (std::int64_t c = 0; c < wide; ++c) total[c] += part[c];
    }
    const std::int64_t head = strip.head[r], t = strip.t[r];
    const MutableTensor& dq = backward.given->dq;
    if (strip.dead[r]) {  // its q is not read: it may hold anything
      for (std::int64_t c = 0; c < wide; ++c) total[c] = 0;
      if (backward.dscale) backward.dscale[row_index(problem, {b, head, t})] = 0;
      if (dq) narrow(total, plan.D, dq.dtype, dq.at(b, head, t), dq.column_stride);
      continue;
    }
    const double scale = natural_scale(job, strip, r);
    if (backward.dscale) {
      const double n = problem.scoring.log_n ? static_cast<double>(most(keys_left(job, strip, r), 1)) : 0;
      backward.dscale[row_index(problem, {b, head, t})] =
          static_cast<double>(dot(queries.q + (row - row0) * plan.D, total, plan.D)) * (problem.scoring.log_n ? __builtin_log(n) : 1);
    }
    for (std::int64_t c = 0; c < plan.D && !problem.scoring.additive; ++c) total[c] *= static_cast<Real>(scale);
    if (problem.scoring.cosine) through_norm(problem.q, b, head, t, plan.D, scratch.row, total);
    if (dq) narrow(total, plan.D, dq.dtype, dq.at(b, head, t), dq.column_stride);
  }
}

template <class Real>
constexpr GradientTable gradients_for = {{tile_rows, panel<Real>, 1},
                                         gradient_scratch_bytes<Real>,
                                         query_bytes<Real>,
                                         pack_queries<Real>,
                                         gradient_slice<Real>,
                                         gradient_fold<Real>};

}  // namespace
}  // namespace levelhead
