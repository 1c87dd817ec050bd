// The end of a row: the output read off its state, into any dtype and strides; or the state itself, kept for later,
// and states joined. Part of kernel.inl.h.
#pragma once

#include "kernel_pack.inl.h"
#include "state.h"

namespace levelhead {
namespace {

LH_INLINE std::int64_t row_index(const Problem& problem, const QueryRow& row) {
  return (row.b * problem.H + row.head) * problem.T + row.t;
}

// What acc is divided by. One where nothing was seen: acc is zero then.
template <class Real>
LH_INLINE Real output_divisor(Real max, Real l, const double* sink) {
  const Real below = denominator(max, l, sink);
  return below == 0 ? Real(1) : below;
}

// acc / below, straight to its place when that has the compute type.
template <class Real>
LH_INLINE void write_output(const Real* acc, Real below, std::int64_t E, Real* spare, DType dtype, char* to,
                            std::int64_t stride) {
  const bool direct = dtype == compute_type<Real> && stride == static_cast<std::int64_t>(sizeof(Real));
  Real* quotients = direct ? reinterpret_cast<Real*>(to) : spare;
  std::int64_t c = 0;
  for (; c + lanes<Real> <= E; c += lanes<Real>) store(quotients + c, load(acc + c) / below);
  for (; c < E; ++c) {
    const Real quotient = acc[c] / below;
    __builtin_memcpy(quotients + c, &quotient, sizeof quotient);
  }
  if (!direct) narrow(spare, E, dtype, to, stride);
}

// The same for a row that has seen all its keys.
template <class Real>
LH_INLINE Real settled_divisor(const Job& job, Row<Real>& row, std::int64_t head) {
  settle(row);
  return output_divisor(row.max, row.l, job.result->sinks ? job.result->sinks + head : nullptr);
}

// With `written`, the output is in its place already.
template <class Real>
void write_row(const Job& job, const QueryRow& at, Row<Real>& row, const Real* acc, bool written, Real* spare) {
  const Problem& problem = *job.problem;
  const Result& result = *job.result;
  const std::int64_t index = row_index(problem, at);
  const Real below = settled_divisor(job, row, at.head);
  if (result.sums) store_row(row, static_cast<Real*>(result.sums) + index * row_sums, result.counts + index * row_counts);
  if (result.logsumexp) {  // a query that does not exist has no sink either
    const double* sink = result.sinks && problem.scoring.has_query(at.b, at.t) ? result.sinks + at.head : nullptr;
    static_cast<Real*>(result.logsumexp)[index] = natural_logsumexp(row.max, row.l, sink);
  }
  if (result.acc)
    for (std::int64_t c = 0; c < problem.E; ++c) static_cast<Real*>(result.acc)[index * problem.E + c] = acc[c];
  if (result.out && !written)
    write_output(acc, below, problem.E, spare, result.out.dtype, result.out.at(at.b, at.head, at.t),
                 result.out.column_stride);
}

template <class Real>
void finish_rows(const HeadStates& states, const double* sink, const MutableTensor& out, std::int64_t b, std::int64_t head) {
  const std::int64_t E = states.E;
  constexpr std::int64_t piece = 256;  // columns at a time: a width has no bound, the stack has
  Real spare[piece];
  for (std::int64_t i = 0; i < states.rows; ++i) {
    const Real* row = static_cast<const Real*>(states.sums) + i * row_sums;
    const Real below = output_divisor(row[0], row[1], sink);
    for (std::int64_t c = 0; c < E; c += piece)
      write_output(static_cast<const Real*>(states.acc) + i * E + c, below, least(piece, E - c), spare, out.dtype,
                   out.at(b, head, i) + c * out.column_stride, out.column_stride);
  }
}

template <class Real>
void keep_partial(const Job& job, const Partials& partials, std::int64_t slot, const Row<Real>& row, const Real* acc) {
  const std::int64_t E = job.plan->E;
  reinterpret_cast<Row<Real>*>(partials.rows)[slot] = row;
  for (std::int64_t c = 0; c < E; ++c) reinterpret_cast<Real*>(partials.acc)[slot * E + c] = acc[c];
}

}  // namespace
}  // namespace levelhead
