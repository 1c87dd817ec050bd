// For very few queries (decoding): keys and values are read once, where they lie, at the speed of memory.
// Nothing is transposed; a score is a dot product along the key. Part of kernel.inl.h.
#pragma once

#include "kernel_pack.inl.h"

namespace levelhead {
namespace {

constexpr int keys_at_once = 4;  // chains enough to hide an FMA's latency, and one load of q for four of k

// Dot products of q with some keys, added up lane by lane, then across lanes in a fixed order.
template <class Real, int keys>
LH_INLINE void dots(const Real* q, const Real* const* k, std::int64_t D, Real* result) {
  Vector<Real> total[keys] = {};
  std::int64_t d = 0;
  for (; d + lanes<Real> <= D; d += lanes<Real>) {
    const Vector<Real> x = load(q + d);
#pragma GCC unroll 4
    for (int i = 0; i < keys; ++i) total[i] += x * load(k[i] + d);
  }
  for (int i = 0; i < keys; ++i) {
    Real rest = 0;
    for (std::int64_t tail = d; tail < D; ++tail)
      rest = fused(q[tail], read<Real>(reinterpret_cast<const char*>(k[i] + tail)), rest);
    result[i] = sum<Real>(total[i]) + rest;
  }
}

// Scores of keys [lo, lo + n) for `rows` queries that lie D apart.
template <class Real>
void stream_keys(const Job& job, std::int64_t b, std::int64_t g, std::int64_t lo, std::int64_t n, const Real* q,
                 std::int64_t rows, const Real* scale, Real* s, Real* spare) {
  const std::int64_t D = job.plan->D, stride = job.plan->score_stride;
  for (std::int64_t j = 0; j < n; j += keys_at_once) {
    const Real* k[keys_at_once];
    const std::int64_t count = least(keys_at_once, n - j);
    for (std::int64_t i = 0; i < count; ++i)
      k[i] = view_vector(job.problem->k, b, g, lo + j + i, D, job.problem->scoring.cosine, spare + i * D);
    for (std::int64_t r = 0; r < rows; ++r) {
      Real* to = s + r * stride + j;
      if (count == keys_at_once) {
        dots<Real, keys_at_once>(q + r * D, k, D, to);
      } else {
        for (std::int64_t i = 0; i < count; ++i) dots<Real, 1>(q + r * D, k + i, D, to + i);
      }
      for (std::int64_t i = 0; i < count; ++i) to[i] *= scale[r];
    }
  }
}

// Where value_tile finds the values of some keys: column panel c begins at data + c * panel_step.
template <class Real>
struct Values {
  const Real* data;  // of the first key
  std::int64_t row_step, panel_step;
  bool tainted;
};

// Values of keys [lo, lo + n): in place when they have the compute type, whole panels and only finite numbers;
// else written out row by row into `room`, with zeros for what is not finite.
template <class Real>
Values<Real> stream_values(const Job& job, std::int64_t b, std::int64_t g, std::int64_t lo, std::int64_t n, Real* room) {
  const Plan& plan = *job.plan;
  const Tensor& v = job.problem->v;
  constexpr std::int64_t bytes = sizeof(Real);
  bool clean = true;
  if (v.dtype == compute_type<Real> && v.column_stride == bytes && v.row_stride % bytes == 0 &&
      plan.E == plan.padded_columns) {
    for (std::int64_t j = 0; j < n && clean; ++j)
      clean = all_finite(reinterpret_cast<const Real*>(v.at(b, g, lo + j)), plan.E);
    if (clean) return {reinterpret_cast<const Real*>(v.at(b, g, lo)), v.row_stride / bytes, 1, false};
  }
  clean = true;
  for (std::int64_t j = 0; j < n; ++j) {
    Real* row = room + j * plan.padded_columns;
    read_vector(v, b, g, lo + j, plan.E, false, row);
    const bool usable = all_finite(row, plan.E);
    clean = clean && usable;
    for (std::int64_t c = usable ? plan.E : 0; c < plan.padded_columns; ++c) row[c] = 0;
  }
  return {room, plan.padded_columns, 1, !clean};
}

}  // namespace
}  // namespace levelhead
