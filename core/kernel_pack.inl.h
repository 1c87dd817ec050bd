// From the caller's arrays to the layout of the register tiles, and back: any dtype, any strides.
// Part of kernel.inl.h.
#pragma once

#include "kernel.h"
#include "kernel_tile.inl.h"

namespace levelhead {
namespace {

template <class Stored>
LH_INLINE Stored read(const char* p) {
  Stored x;
  __builtin_memcpy(&x, p, sizeof x);  // the array may be aligned to nothing
  return x;
}

template <class Stored, class Real, class Widen>
LH_INLINE void widen_as(const char* from, std::int64_t stride, std::int64_t n, Real* to, Widen widen) {
  if (stride == static_cast<std::int64_t>(sizeof(Stored))) {
    for (std::int64_t i = 0; i < n; ++i)
      to[i] = static_cast<Real>(widen(read<Stored>(from + i * static_cast<std::int64_t>(sizeof(Stored)))));
  } else {
    for (std::int64_t i = 0; i < n; ++i) to[i] = static_cast<Real>(widen(read<Stored>(from + i * stride)));
  }
}

// n numbers of any dtype, `stride` bytes apart, as the compute type.
template <class Real>
void widen(const char* from, DType dtype, std::int64_t stride, std::int64_t n, Real* to) {
  switch (dtype) {
    case DType::f32: return widen_as<float>(from, stride, n, to, [](float x) { return x; });
    case DType::f64: return widen_as<double>(from, stride, n, to, [](double x) { return x; });
    case DType::f16: return widen_as<std::uint16_t>(from, stride, n, to, [](std::uint16_t x) { return widen_f16(x); });
    case DType::bf16: return widen_as<std::uint16_t>(from, stride, n, to, [](std::uint16_t x) { return widen_bf16(x); });
    case DType::boolean: return;
  }
}

template <class Stored, class Real, class Narrow>
LH_INLINE void narrow_as(const Real* from, std::int64_t n, char* to, std::int64_t stride, Narrow narrow) {
  for (std::int64_t i = 0; i < n; ++i) {
    const Stored x = narrow(from[i]);
    __builtin_memcpy(to + i * stride, &x, sizeof x);
  }
}

template <class Real>
void narrow(const Real* from, std::int64_t n, DType dtype, char* to, std::int64_t stride) {
  switch (dtype) {
    case DType::f32: return narrow_as<float>(from, n, to, stride, [](Real x) { return static_cast<float>(x); });
    case DType::f64: return narrow_as<double>(from, n, to, stride, [](Real x) { return static_cast<double>(x); });
    case DType::f16:
      return narrow_as<std::uint16_t>(from, n, to, stride, [](Real x) { return narrow_f16(static_cast<float>(x)); });
    case DType::bf16:
      return narrow_as<std::uint16_t>(from, n, to, stride, [](Real x) { return narrow_bf16(static_cast<float>(x)); });
    case DType::boolean: return;
  }
}

// Divides a row by its length, in double: no float overflows there. The zero vector stays zero.
template <class Real>
void normalise(Real* row, std::int64_t n) {
  double squares = 0;
  for (std::int64_t i = 0; i < n; ++i) squares += static_cast<double>(row[i]) * static_cast<double>(row[i]);
  const double length = __builtin_sqrt(squares);
  if (length == 0) return;
  for (std::int64_t i = 0; i < n; ++i) row[i] = static_cast<Real>(static_cast<double>(row[i]) / length);
}

// One row of an array of vectors: widened, and normalised when the logits are cosines.
template <class Real>
LH_INLINE void read_vector(const Tensor& x, std::int64_t b, std::int64_t head, std::int64_t row, std::int64_t n,
                           bool unit_length, Real* to) {
  widen(x.at(b, head, row), x.dtype, x.column_stride, n, to);
  if (unit_length) normalise(to, n);
}

template <class Real>
LH_INLINE bool all_finite(const Real* x, std::int64_t n) {
  Real probe = 0;
  for (std::int64_t i = 0; i < n; ++i) probe += x[i] * 0;  // NaN from the first inf or NaN on
  return probe == probe;
}

// Keys and values of one block. `row` has room for the wider of a key and a value.
template <class Real>
void pack(const Job& job, std::int64_t b, std::int64_t g, std::int64_t block, const Packed& packed, void* scratch) {
  const Problem& problem = *job.problem;
  const Plan& plan = *job.plan;
  constexpr int width = panel<Real>;
  const std::int64_t first = block * plan.key_block;
  const std::int64_t end = first + plan.key_block < problem.S ? first + plan.key_block : problem.S;
  const std::int64_t padded_end = round_up(end, width);
  Real* row = static_cast<Real*>(scratch);

  for (std::int64_t j = first; j < padded_end; ++j) {
    Real* column = static_cast<Real*>(packed.keys) + j / width * width * plan.D + j % width;
    if (j < end) {
      read_vector(problem.k, b, g, j, plan.D, problem.scoring.cosine, row);
      for (std::int64_t d = 0; d < plan.D; ++d) column[d * width] = row[d];
    } else {
      for (std::int64_t d = 0; d < plan.D; ++d) column[d * width] = 0;
    }
  }
  if (!problem.v) return;
  bool tainted = false;
  for (std::int64_t c = plan.E; c < plan.padded_columns; ++c) row[c] = 0;
  for (std::int64_t j = first; j < padded_end; ++j) {
    bool usable = j < end;
    if (usable) {
      read_vector(problem.v, b, g, j, plan.E, false, row);
      usable = all_finite(row, plan.E);
      tainted = tainted || !usable;
    }
    Real* to = static_cast<Real*>(packed.values) + j * width;
    for (std::int64_t c = 0; c < plan.padded_columns; c += width, to += plan.padded_keys * width)
      for (int half = 0; half < width; half += lanes<Real>)
        store(to + half, usable ? load(row + c + half) : Vector<Real>{});
  }
  packed.tainted[block] = tainted;
}

}  // namespace
}  // namespace levelhead
