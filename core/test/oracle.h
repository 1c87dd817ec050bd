// oracle.h: attention by its definition, for the tests: double precision, one row at a time, every logit kept.
// It refuses to share a line with the kernel; where both agree, two readings of the definition agree.

#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "attention.h"

namespace oracle {

using levelhead::DType;
using Index = std::int64_t;
inline constexpr double inf = std::numeric_limits<double>::infinity();
inline constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

template <class Int>
std::size_t at(Int i) {
  return static_cast<std::size_t>(i);
}

// ---- arrays --------------------------------------------------------------------------------------------------

inline Index bytes_of(DType dtype) {
  switch (dtype) {
    case DType::f64: return 8;
    case DType::f32: return 4;
    case DType::boolean: return 1;
    default: return 2;
  }
}

inline double widened_f16(unsigned bits) {
  const int exponent = static_cast<int>(bits >> 10 & 31);
  const double fraction = bits & 1023, sign = bits & 0x8000 ? -1 : 1;
  if (exponent == 31) return fraction != 0 ? not_a_number : sign * inf;
  return sign * (exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24));
}

inline unsigned narrowed_f16(double x) {  // nearest, by search: slow and plain
  if (std::isnan(x)) return 0x7e00;
  const unsigned sign = std::signbit(x) ? 0x8000 : 0;
  unsigned low = 0, high = 0x7c00;
  while (high - low > 1) {
    const unsigned middle = (low + high) / 2;
    (widened_f16(middle) <= std::abs(x) ? low : high) = middle;
  }
  const double to_low = std::abs(x) - widened_f16(low), to_high = widened_f16(high) - std::abs(x);
  if (std::isinf(x)) return sign | 0x7c00;
  return sign | (to_high < to_low || (to_high == to_low && low % 2) ? high : low);
}

// How the four dimensions lie in memory: the kernel must not care.
enum class Layout { contiguous, tokens_first, reversed, columns_apart, misaligned };

// A (B, heads, rows, columns) array of any dtype, in memory that ends where the last element does, so that
// AddressSanitizer sees every step beyond. Dimensions in `broadcast` have one element and stride 0.
class Array {
 public:
  Array() = default;
  Array(DType dtype, Index B, Index heads, Index rows, Index columns, Layout layout = Layout::contiguous,
        bool broadcast_batch = false, bool broadcast_heads = false)
      : dtype_(dtype), size_{broadcast_batch ? 1 : B, broadcast_heads ? 1 : heads, rows, columns} {
    const Index unit = bytes_of(dtype), step = layout == Layout::columns_apart ? 3 * unit : unit;
    const bool tokens_first = layout == Layout::tokens_first;
    stride_[3] = step;
    stride_[2] = step * columns * (tokens_first ? size_[1] : 1);
    stride_[1] = tokens_first ? step * columns : stride_[2] * rows;
    stride_[0] = step * columns * rows * size_[1];
    Index last = 0, count = 1;
    for (int i = 0; i < 4; ++i) last += stride_[i] * (size_[i] - 1), count *= size_[i];
    first_ = layout == Layout::misaligned ? 1 : 0;
    bytes_.resize(count ? at(first_ + last + unit) : 0);
    if (layout == Layout::reversed && count)
      for (first_ = last; Index& stride : stride_) stride = -stride;
    if (broadcast_batch) stride_[0] = 0;
    if (broadcast_heads) stride_[1] = 0;
  }

  void set(Index b, Index h, Index i, Index j, double value) {
    char* to = where(b, h, i, j);
    const auto write = [&](auto x) { std::memcpy(to, &x, sizeof x); };
    switch (dtype_) {
      case DType::f64: return write(value);
      case DType::f32: return write(static_cast<float>(value));
      case DType::f16: return write(static_cast<std::uint16_t>(narrowed_f16(value)));
      case DType::bf16: return write(narrowed_bf16(static_cast<float>(value)));
      case DType::boolean: return write(static_cast<char>(value != 0));
    }
  }

  double get(Index b, Index h, Index i, Index j) const {
    const char* from = const_cast<Array*>(this)->where(b, h, i, j);
    const auto read = [&](auto x) { return std::memcpy(&x, from, sizeof x), x; };
    switch (dtype_) {
      case DType::f64: return read(double{});
      case DType::f32: return static_cast<double>(read(float{}));
      case DType::f16: return widened_f16(read(std::uint16_t{}));
      case DType::bf16: return static_cast<double>(std::bit_cast<float>(std::uint32_t{read(std::uint16_t{})} << 16));
      case DType::boolean: return read(char{});
    }
    return not_a_number;
  }

  template <class Draw>
  void fill(Draw draw) {
    for (Index b = 0; b < size_[0]; ++b)
      for (Index h = 0; h < size_[1]; ++h)
        for (Index i = 0; i < size_[2]; ++i)
          for (Index j = 0; j < size_[3]; ++j) set(b, h, i, j, draw());
  }

  template <class View>
  View view() {
    View view;
    static char empty[8];  // a size of zero still is an array, and not "no array"
    view.data = bytes_.empty() ? empty : bytes_.data() + first_;
    view.dtype = dtype_;
    view.batch_stride = stride_[0], view.head_stride = stride_[1];
    view.row_stride = stride_[2], view.column_stride = stride_[3];
    return view;
  }

  DType dtype() const { return dtype_; }
  const std::vector<char>& bytes() const { return bytes_; }

 private:
  static std::uint16_t narrowed_bf16(float x) {  // to nearest, ties to even
    const auto bits = std::bit_cast<std::uint32_t>(x);
    return static_cast<std::uint16_t>(std::isnan(x) ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
  char* where(Index b, Index h, Index i, Index j) {
    return bytes_.data() + first_ + b * stride_[0] + h * stride_[1] + i * stride_[2] + j * stride_[3];
  }

  DType dtype_ = DType::f32;
  Index size_[4] = {}, stride_[4] = {}, first_ = 0;
  std::vector<char> bytes_;
};

// ---- a problem with the memory it points to ------------------------------------------------------------------

enum class Mask { none, boolean, bias };

struct Case {
  DType dtype = DType::f32;
  Index B = 1, H = 1, G = 1, T = 1, S = 1, D = 8, E = 8;
  bool causal = false;
  Index left = levelhead::unlimited, right = levelhead::unlimited, query_shift = 0;  // query_start = S - T + shift
  Mask mask = Mask::none;
  double softcap = 0, dropout = 0, factor = 1;  // factor multiplies 1/sqrt(D): sharper rows
  bool cosine = false, log_n = false, alibi = false, sinks = false, lengths = false, segments = false, values = true;
  bool query_lengths = false;
  Layout layout = Layout::contiguous;
  unsigned seed = 1;
};

struct Inputs {
  explicit Inputs(const Case& of) : c(of), random(of.seed) {
    std::normal_distribution<double> normal;
    const auto gaussian = [&] { return normal(random); };
    q = {c.dtype, c.B, c.H, c.T, c.D, c.layout};
    k = {c.dtype, c.B, c.G, c.S, c.D, c.layout};
    v = {c.dtype, c.B, c.G, c.S, c.E, c.layout};
    q.fill(gaussian), k.fill(gaussian), v.fill(gaussian);
    scale.assign(at(c.H), c.factor / std::sqrt(static_cast<double>(std::max<Index>(c.D, 1))));
    for (Index h = 0; h < c.H; ++h) scale[at(h)] *= 1 + 0.1 * static_cast<double>(h);
    for (Index h = 0; h < c.H; ++h) slopes.push_back(std::ldexp(1.0, -1 - static_cast<int>(h)));
    for (Index h = 0; h < c.H; ++h) sinks.push_back(h == 1 ? -inf : 0.5 * gaussian());
    for (Index b = 0; b < c.B; ++b) {
      starts.push_back(c.S - c.T + c.query_shift + b % 2);
      lengths.push_back(b == 0 ? c.S * 2 / 3 : static_cast<Index>(random() % at(c.S + 1)));
      query_lengths.push_back(b == 0 ? c.T * 2 / 3 : static_cast<Index>(c.seed % 5) - 1);  // of others few, or none
    }
    const auto ids = [&](std::vector<Index>& out, Index n) {  // three packed sequences, the last id out of order
      for (Index i = 0; i < c.B * n; ++i) out.push_back(i % n * 3 / n == 2 ? -7 : i % n * 3 / n);
    };
    ids(query_segments, c.T), ids(key_segments, c.S);
    if (c.mask == Mask::none) return;
    const bool boolean = c.mask == Mask::boolean;
    mask = {boolean ? DType::boolean : c.dtype, c.B, c.H, c.T, c.S, c.layout, c.seed % 2 == 0, c.seed % 3 == 0};
    // Holes of one key and of many: whole tiles are then hidden.
    mask.fill([&, hole = 0]() mutable {
      if (hole > 0) return --hole, boolean ? 0 : -inf;
      if (random() % 64 == 0) hole = 40;
      return random() % 4 == 0 ? (boolean ? 0 : -inf) : (boolean ? 1 : gaussian());
    });
  }

  levelhead::Problem problem() {
    levelhead::Problem p;
    p.B = c.B, p.H = c.H, p.G = c.G, p.T = c.T, p.S = c.S, p.D = c.D, p.E = c.values ? c.E : 0;
    p.q = q.view<levelhead::Tensor>(), p.k = k.view<levelhead::Tensor>();
    if (c.values) p.v = v.view<levelhead::Tensor>();
    levelhead::Scoring& s = p.scoring;
    s.scale = scale.data(), s.cosine = c.cosine, s.log_n = c.log_n, s.causal = c.causal;
    s.left = c.left, s.right = c.right, s.softcap = c.softcap, s.dropout = c.dropout, s.seed = c.seed;
    if (c.alibi) s.alibi = slopes.data();
    if (c.mask != Mask::none) s.mask = mask.view<levelhead::Tensor>();
    if (c.lengths) s.key_lengths = lengths.data();
    if (c.query_lengths) s.query_lengths = query_lengths.data();
    if (c.segments) s.query_segments = query_segments.data(), s.key_segments = key_segments.data();
    query_run = {0, c.T, 1}, key_run = {0, c.S, 1};
    s.queries = {&query_run, 1, starts.data()};
    s.keys = {&key_run, 1, nullptr};
    return p;
  }

  Index position(Index b, Index t) const { return starts[at(b)] + t; }

  bool exists(Index b, Index t) const { return !c.query_lengths || t < query_lengths[at(b)]; }

  // Left to the row by position and segment; a mask may hide more.
  bool in_reach(Index b, Index t, Index j) const {
    const Index p = position(b, t);
    if (!exists(b, t)) return false;
    if (c.causal && j > p) return false;
    if (j < p - c.left || j > p + c.right) return false;
    if (c.lengths && j >= lengths[at(b)]) return false;
    return !c.segments || query_segments[at(b * c.T + t)] == key_segments[at(b * c.S + j)];
  }
  bool visible(Index b, Index h, Index t, Index j) const {
    if (!in_reach(b, t, j)) return false;
    if (c.mask == Mask::boolean) return mask.get(b, h, t, j) != 0;
    return c.mask == Mask::none || mask.get(b, h, t, j) != -inf;
  }
  Index kv_head(Index h) const { return h / (c.H / c.G); }

  Case c;
  std::mt19937_64 random;
  Array q, k, v, mask;
  std::vector<double> scale, slopes, sinks;
  std::vector<Index> starts, lengths, query_lengths, query_segments, key_segments;
  levelhead::Run query_run{}, key_run{};
};

// ---- the definition ------------------------------------------------------------------------------------------

inline std::uint64_t splitmix64(std::uint64_t z) {
  z += 0x9E3779B97F4A7C15;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

inline bool kept(double rate, std::uint64_t seed, Index b, Index h, Index p, Index j) {
  const std::uint64_t key = splitmix64(
      splitmix64(splitmix64(splitmix64(seed) ^ static_cast<std::uint64_t>(b)) ^ static_cast<std::uint64_t>(h)) ^
      static_cast<std::uint64_t>(p));
  const auto mix = [](std::uint32_t x) {
    x ^= x >> 16, x *= 0x7feb352d, x ^= x >> 15, x *= 0x846ca68b;
    return x ^ (x >> 16);
  };
  const auto wide = static_cast<std::uint64_t>(j);
  std::uint32_t x = mix(static_cast<std::uint32_t>(wide) ^ static_cast<std::uint32_t>(key));
  x = mix(x ^ (static_cast<std::uint32_t>(key >> 32) + static_cast<std::uint32_t>(wide >> 32) * 0x9E3779B9u));
  return x >= static_cast<std::uint64_t>(rate * 4294967296.0);
}

struct RowTruth {
  std::vector<double> s, out;  // logits, -inf where hidden; output with sinks and dropout
  double max = -inf, l = 0, h = 0, e2 = 0, mean = 0, m2 = 0, min = inf, first = -inf;
  Index count = 0;
};

inline RowTruth attend(const Inputs& in, Index b, Index h, Index t) {
  const Case& c = in.c;
  RowTruth row;
  Index reach = 0;
  for (Index j = 0; j < c.S; ++j) reach += in.in_reach(b, t, j);
  const auto norm = [&](const Array& x, Index head, Index i) {
    double squares = 0;
    for (Index d = 0; d < c.D; ++d) squares += x.get(b, head, i, d) * x.get(b, head, i, d);
    return squares > 0 ? std::sqrt(squares) : 1.0;
  };
  const double q_norm = c.cosine ? norm(in.q, h, t) : 1;
  for (Index j = 0; j < c.S; ++j) {
    double s = -inf;
    if (in.visible(b, h, t, j)) {
      s = 0;
      for (Index d = 0; d < c.D; ++d) s += in.q.get(b, h, t, d) * in.k.get(b, in.kv_head(h), j, d);
      if (c.cosine) s /= q_norm * norm(in.k, in.kv_head(h), j);
      s *= in.scale[at(h)] * (c.log_n ? std::log(static_cast<double>(reach)) : 1);
      if (c.softcap > 0) s = c.softcap * std::tanh(s / c.softcap);
      if (c.alibi) s -= in.slopes[at(h)] * static_cast<double>(std::abs(in.position(b, t) - j));
      if (c.mask == Mask::bias) s += in.mask.get(b, h, t, j);
    }
    row.s.push_back(s);
    if (s == -inf) continue;
    if (j == 0) row.first = s;
    ++row.count, row.mean += s, row.max = std::max(row.max, s), row.min = std::min(row.min, s);
  }
  if (row.count) row.mean /= static_cast<double>(row.count);
  if (c.values) row.out.assign(at(c.E), 0.0);
  for (Index j = 0; j < c.S; ++j) {
    const double s = row.s[at(j)];
    if (s == -inf) continue;
    const double p = std::exp(s - row.max);
    row.l += p, row.h += p * (s - row.max), row.e2 += p * p, row.m2 += (s - row.mean) * (s - row.mean);
    if (c.dropout > 0 && !kept(c.dropout, c.seed, b, h, in.position(b, t), j)) continue;
    for (Index e = 0; e < static_cast<Index>(row.out.size()); ++e)
      row.out[at(e)] += p / (1 - c.dropout) * in.v.get(b, in.kv_head(h), j, e);
  }
  const double denominator = row.l + (c.sinks && row.count ? std::exp(in.sinks[at(h)] - row.max) : 0);
  for (double& value : row.out) value = row.count ? value / denominator : 0;
  return row;
}

}  // namespace oracle
