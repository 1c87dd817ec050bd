// cases.h: cases for the tests of forward() and backward(): on every ISA, with options drawn at random.
// It refuses to judge results: that is oracle.h's and the tests'.

#pragma once

#include <cstdio>
#include <string>

#include "check.h"
#include "dispatch.h"
#include "oracle.h"

namespace cases {

using namespace levelhead;
using oracle::Case, oracle::Index, oracle::Layout, oracle::Mask;

inline std::string text(const Case& c) {
  char line[256];
  const auto n = [](Index x) { return static_cast<long long>(x == unlimited ? -1 : x); };
  std::snprintf(line, sizeof line,
                "%s dtype %d B%lld H%lld G%lld T%lld S%lld D%lld E%lld causal %d window %lld,%lld shift %lld "
                "mask %d cap %g drop %g cos %d logn %d alibi %d sinks %d len %d qlen %d seg %d v %d layout %d seed %u",
                current_isa().c_str(), static_cast<int>(c.dtype), n(c.B), n(c.H), n(c.G), n(c.T), n(c.S), n(c.D),
                n(c.E), c.causal, n(c.left), n(c.right), n(c.query_shift), static_cast<int>(c.mask), c.softcap,
                c.dropout, c.cosine, c.log_n, c.alibi, c.sinks, c.lengths, c.query_lengths, c.segments, c.values,
                static_cast<int>(c.layout), c.seed);
  return line;
}

// Under ThreadSanitizer, 20 times slower and blind to arithmetic, a few draws do.
#ifdef __SANITIZE_THREAD__
constexpr unsigned draws = 15;
#else
constexpr unsigned draws = 150;
#endif

// Calls body with the dtypes that an ISA computes with code of its own.
template <class Body>
void on_every_isa(Body body) {
  const std::string before = current_isa();
  for (const std::string& isa : available_isas()) {
    choose_isa(isa);
    CHECK(current_isa() == isa);
    if (isa == "avx512bf16") {
      body(DType::bf16);
    } else {
      for (DType dtype : {DType::f32, DType::f64}) body(dtype);
    }
  }
  choose_isa(before);
}

// Small cases with every option drawn at random; the numbers lie around tiles of 6, 12, 16 and 32.
inline Case random_case(DType dtype, unsigned seed) {
  std::mt19937 random(seed);
  const auto pick = [&](std::initializer_list<Index> from) { return from.begin()[random() % from.size()]; };
  const auto once_in = [&](unsigned n) { return random() % n == 0; };
  Case c{.dtype = dtype, .seed = seed};
  c.B = pick({1, 1, 2}), c.G = pick({1, 2}), c.H = c.G * pick({1, 1, 2, 3});
  c.T = pick({1, 2, 5, 6, 7, 11, 12, 13, 25, 47, 49}), c.S = pick({1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 65, 100});
  c.D = pick({1, 2, 3, 7, 8, 16, 17, 33}), c.E = once_in(2) ? c.D : pick({1, 2, 5, 15, 16, 17, 32, 33, 40});
  c.causal = once_in(3);
  if (once_in(3)) c.left = pick({0, 1, 3, 10, 40});
  if (once_in(3)) c.right = pick({0, 1, 3, 10, 40});
  if (once_in(3)) c.query_shift = pick({-50, -3, 2, 60});
  c.mask = once_in(2) ? Mask::none : once_in(2) ? Mask::boolean : Mask::bias;
  if (once_in(4)) c.softcap = 2.5;
  if (once_in(4)) c.dropout = 0.3;
  if (once_in(3)) c.factor = 4;
  c.cosine = once_in(5), c.log_n = once_in(5), c.alibi = once_in(4), c.sinks = once_in(3);
  c.lengths = once_in(4), c.segments = once_in(4), c.values = !once_in(8);
  c.layout = static_cast<Layout>(random() % 5);
  return c;
}

}  // namespace cases
