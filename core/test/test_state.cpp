// The monoid of state.h: identity on both sides to the bit, associativity to rounding, empties, extremes, NaN.

#include "state.h"

#include <cmath>
#include <limits>
#include <random>

#include "check.h"

using namespace levelhead;

namespace {

constexpr double inf = std::numeric_limits<double>::infinity();

// A row and its un-normalised output, as they travel together.
template <class Real>
struct State {
  Row<Real> row;
  std::vector<Real> acc;
};

// The state of consecutive keys by the definitions, in double: the oracle. A logit of -inf is hidden.
template <class Real>
State<Real> state_of(const std::vector<double>& logits, std::int64_t position, int E = 3) {
  State<Real> state{{}, std::vector<Real>(static_cast<std::size_t>(E))};
  Row<Real>& row = state.row;
  double max = -inf, l = 0, h = 0, e2 = 0, total = 0, m2 = 0;
  for (std::size_t j = 0; j < logits.size(); ++j) {
    const double s = logits[j];
    const std::int64_t key = position + static_cast<std::int64_t>(j);
    if (s == -inf) continue;
    ++row.count;
    total += s;
    if (key == 0) row.first = static_cast<Real>(s);
    if (s < static_cast<double>(row.min)) row.min = static_cast<Real>(s);
    if (s > max) max = s, row.argmax = key;
  }
  if (row.count == 0) return state;
  const double mean = total / static_cast<double>(row.count);
  std::vector<double> acc(state.acc.size());
  for (std::size_t j = 0; j < logits.size(); ++j) {
    const double s = logits[j], p = std::exp2(s - max);
    if (s == -inf) continue;
    l += p, e2 += p * p, m2 += (s - mean) * (s - mean);
    if (p > 0) h += p * (s - max);
    for (std::size_t e = 0; e < acc.size(); ++e)
      acc[e] += p * std::sin(static_cast<double>(position) + static_cast<double>(j) + 10.0 * static_cast<double>(e));
  }
  row.max = static_cast<Real>(max), row.l = static_cast<Real>(l), row.h = static_cast<Real>(h);
  row.e2 = static_cast<Real>(e2), row.mean = static_cast<Real>(mean), row.m2 = static_cast<Real>(m2);
  for (std::size_t e = 0; e < acc.size(); ++e) state.acc[e] = static_cast<Real>(acc[e]);
  return state;
}

template <class Real>
State<Real> merged(State<Real> a, const State<Real>& b) {
  const Share<Real> share = merge(a.row, b.row);
  settle(a.row);
  for (std::size_t e = 0; e < a.acc.size(); ++e) a.acc[e] = a.acc[e] * share.a + b.acc[e] * share.b;
  return a;
}

// Field by field: padding would spoil a memcmp of the whole.
template <class Real>
bool same_bits(const State<Real>& a, const State<Real>& b) {
  Real x[row_sums], y[row_sums];
  std::int64_t m[row_counts], n[row_counts];
  store_row(a.row, x, m);
  store_row(b.row, y, n);
  return !std::memcmp(x, y, sizeof x) && !std::memcmp(m, n, sizeof m) &&
         !std::memcmp(a.acc.data(), b.acc.data(), a.acc.size() * sizeof(Real));
}

template <class Real>
bool near(Real a, Real b, double scale) {
  if (a == b || (std::isnan(a) && std::isnan(b))) return true;
  const double apart = std::abs(static_cast<double>(a) - static_cast<double>(b));
  return apart <= 50.0 * scale * std::numeric_limits<Real>::epsilon();
}

template <class Real>
void check_near(const State<Real>& a, const State<Real>& b, const char* what) {
  const Row<Real>&x = a.row, &y = b.row;
  const auto real = [](Real value) { return static_cast<double>(value); };
  const auto field = [&](const char* name, Real got, Real expected, double scale) {
    CHECK(near(got, expected, scale), "%s: %s %g %g", what, name, real(got), real(expected));
  };
  const double n = real(static_cast<Real>(x.count));
  // Rounding the distance between two maxima, at most 2M, by eps changes 2^x of it by a factor 1 + 2M eps;
  // beyond 100 the smaller side weighs nothing.
  const double M = std::min(100.0, std::max(std::abs(real(x.max)), std::abs(real(x.min))));
  const double spread = x.count ? std::abs(real(x.mean)) + std::sqrt(real(x.m2) / n) : 0;
  CHECK(x.count == y.count && x.argmax == y.argmax, "%s", what);
  field("max", x.max, y.max, 0), field("min", x.min, y.min, 0), field("first", x.first, y.first, 0);
  field("l", x.l, y.l, (1 + M) * n), field("h", x.h, y.h, (1 + M) * n), field("e2", x.e2, y.e2, (1 + M) * n);
  field("mean", x.mean, y.mean, 1 + spread), field("m2", x.m2, y.m2, (1 + spread * spread) * n);
  for (std::size_t e = 0; e < a.acc.size(); ++e) field("acc", a.acc[e], b.acc[e], (1 + M) * n);
}

// Logits of every temper: gentle, wide, equal maxima, hidden ones, all hidden, none at all.
std::vector<std::vector<double>> sequences() {
  std::mt19937_64 random(7);
  std::normal_distribution<double> normal;
  std::vector<std::vector<double>> all = {{}, {0}, {-inf}, {-inf, -inf, -inf}, {-inf, 2, -inf}, {5, 5, 5, 5}, {-3, -3}};
  for (double width : {1e-3, 1.0, 30.0, 1e4})
    for (int n : {1, 2, 17, 200}) {
      std::vector<double> logits;
      for (int j = 0; j < n; ++j)  // through float: both types then see the same numbers
        logits.push_back(random() % 5 ? static_cast<double>(static_cast<float>(width * normal(random))) : -inf);
      all.push_back(logits);
    }
  return all;
}

std::vector<double> slice(const std::vector<double>& logits, std::size_t from, std::size_t to) {
  return {logits.begin() + static_cast<std::ptrdiff_t>(from), logits.begin() + static_cast<std::ptrdiff_t>(to)};
}

template <class Real>
State<Real> nothing() {
  return state_of<Real>({}, 0);
}

template <class Real>
void identity() {
  for (const auto& logits : sequences()) {
    const State<Real> some = state_of<Real>(logits, 0);
    CHECK(same_bits(merged(some, nothing<Real>()), some), "right identity, %zu logits", logits.size());
    CHECK(same_bits(merged(nothing<Real>(), some), some), "left identity, %zu logits", logits.size());
  }
  CHECK(same_bits(merged(nothing<Real>(), nothing<Real>()), nothing<Real>()));
}

template <class Real>
void associativity() {
  for (const auto& logits : sequences())
    for (std::size_t i : {std::size_t{0}, logits.size() / 3, logits.size()})
      for (std::size_t j : {i, (i + logits.size()) / 2, logits.size()}) {
        const State<Real> a = state_of<Real>(slice(logits, 0, i), 0);
        const State<Real> b = state_of<Real>(slice(logits, i, j), static_cast<std::int64_t>(i));
        const State<Real> c = state_of<Real>(slice(logits, j, logits.size()), static_cast<std::int64_t>(j));
        const State<Real> left = merged(merged(a, b), c), right = merged(a, merged(b, c));
        check_near(left, right, "(ab)c = a(bc)");
        check_near(left, state_of<Real>(logits, 0), "the parts make the whole");
      }
}

template <class Real>
void extremes() {
  const double huge = 1e30;
  for (double low : {-huge, -1.0, 0.0, huge})
    for (double high : {-huge, 0.0, 1.0, huge}) {
      const State<Real> a = state_of<Real>({low}, 0), b = state_of<Real>({high}, 1);
      const State<Real> both = merged(a, b);
      const double max = std::max(low, high);
      CHECK(both.row.max == static_cast<Real>(max) && both.row.min == static_cast<Real>(std::min(low, high)));
      CHECK(both.row.argmax == (high > low ? 1 : 0), "low %g high %g", low, high);
      const double l = std::exp2(low - max) + std::exp2(high - max);
      CHECK(near(both.row.l, static_cast<Real>(l), 2) && std::isfinite(both.row.h) && std::isfinite(both.row.e2));
      for (Real value : both.acc) CHECK(std::isfinite(value));
      CHECK(!std::isnan(both.row.m2));  // 1e60 overflows float to inf, and may; it must not become NaN
    }
}

template <class Real>
void not_a_number() {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  State<Real> poisoned = state_of<Real>({1}, 0);
  poisoned.row.l = static_cast<Real>(nan);
  settle(poisoned.row);
  for (Real value : {poisoned.row.max, poisoned.row.l, poisoned.row.h, poisoned.row.e2, poisoned.row.mean,
                     poisoned.row.m2, poisoned.row.min})
    CHECK(std::isnan(value));
  CHECK(poisoned.row.argmax == no_key && poisoned.row.count == 1);
  for (const auto& logits : sequences()) {
    const State<Real> some = state_of<Real>(logits, 1);
    for (const State<Real>& both : {merged(poisoned, some), merged(some, poisoned)}) {
      for (Real value : {both.row.max, both.row.l, both.row.h, both.row.e2, both.row.mean, both.row.m2, both.row.min})
        CHECK(std::isnan(value), "%zu logits", logits.size());
      CHECK(both.row.argmax == no_key && both.row.count == some.row.count + 1);
    }
  }
}

template <class Real>
void sinks() {
  const double sink = 0.5, hidden = -inf, huge = 1e30;
  CHECK(denominator(Real(1), Real(2), nullptr) == Real(2));
  CHECK(denominator(Real(1), Real(2), &hidden) == Real(2));
  CHECK(near(denominator(Real(1), Real(2), &sink), static_cast<Real>(2 + std::exp(0.5 - ln_2)), 3));
  CHECK(denominator(-Row<Real>::infinity, Real(0), nullptr) == 0);  // nothing seen, nothing to divide by
  CHECK(denominator(-Row<Real>::infinity, Real(0), &sink) > 0);     // 0 / 1: a row of zeros, not of NaN
  CHECK(denominator(Real(1), Real(2), &huge) == Row<Real>::infinity);  // all weight on the sink: output 0
}

template <class Real>
void storage() {
  const State<Real> some = state_of<Real>({3, 1, 2}, 0);
  Real sums[row_sums];
  std::int64_t counts[row_counts];
  store_row(some.row, sums, counts);
  CHECK(sums[0] == 3 && sums[1] == some.row.l && sums[4] == 2 && sums[6] == 1 && sums[7] == 3);
  CHECK(counts[0] == 3 && counts[1] == 0);
  CHECK(same_bits(State<Real>{load_row(sums, counts), some.acc}, some));
}

}  // namespace

TEST(identity_to_the_bit) { identity<float>(), identity<double>(); }
TEST(associative_to_rounding) { associativity<float>(), associativity<double>(); }
TEST(huge_logits) { extremes<float>(), extremes<double>(); }
TEST(nan_reaches_every_field) { not_a_number<float>(), not_a_number<double>(); }
TEST(sinks_join_at_the_end) { sinks<float>(), sinks<double>(); }
TEST(stored_and_loaded) { storage<float>(), storage<double>(); }
