// query_lengths, forward and backward, on every ISA: queries beyond the length do not exist, whatever their numbers hold,
// and the others keep their bits. What the outputs are is checked against the definition in test_forward.cpp.

#include <string>

#include "cases.h"
#include "check.h"
#include "oracle.h"
#include "state.h"
#include "threads.h"

using namespace levelhead;
using oracle::at, oracle::Array, oracle::Case, oracle::Index, oracle::Inputs, oracle::Mask;
using oracle::inf, oracle::not_a_number;
using cases::draws, cases::on_every_isa, cases::random_case, cases::text;

namespace {

// Bytes of rows, so that a comparison sees every bit.
struct Rows {
  std::vector<char> bytes;
  Index row_bytes = 0;

  Rows(Index rows, Index bytes_per_row) : bytes(at(rows * bytes_per_row), 77), row_bytes(bytes_per_row) {}
  bool same(const Rows& other, Index row) const {
    return !std::memcmp(bytes.data() + row * row_bytes, other.bytes.data() + row * row_bytes, at(row_bytes));
  }
  template <class Real>
  const Real* row(Index i) const {
    return reinterpret_cast<const Real*>(bytes.data() + i * row_bytes);
  }
};

struct Forward {
  Array out;
  Rows logsumexp, acc, sums, counts;
};

Index real_bytes(const Case& c) { return c.dtype == DType::f64 ? 8 : 4; }

Forward forward_of(Inputs& in, const Problem& problem, int threads, bool statistics) {
  const Case& c = in.c;
  const Index rows = c.B * c.H * c.T, real = real_bytes(c);
  Forward o{{c.dtype, c.B, c.H, c.T, c.E, c.layout}, {rows, real}, {rows, c.E * real}, {rows, row_sums * real}, {rows, row_counts * 8}};
  o.out.fill([] { return 77; });
  Result result;
  result.out = o.out.view<MutableTensor>();
  result.logsumexp = o.logsumexp.bytes.data();
  if (c.sinks) result.sinks = in.sinks.data();
  if (statistics) {
    result.acc = o.acc.bytes.data(), result.sums = o.sums.bytes.data();
    result.counts = reinterpret_cast<Index*>(o.counts.bytes.data());
  }
  Interrupt never;
  CHECK(forward(problem, result, threads, never));
  return o;
}

template <class Body>
void for_rows(const Case& c, const Body& body) {
  for (Index b = 0; b < c.B; ++b)
    for (Index h = 0; h < c.H; ++h)
      for (Index t = 0; t < c.T; ++t) body(b, h, t, (b * c.H + h) * c.T + t);
}

void poison(Inputs& in, const Problem& problem, Array& x, Index columns) {
  for_rows(in.c, [&](Index b, Index h, Index t, Index) {
    if (!problem.scoring.has_query(b, t))
      for (Index d = 0; d < columns; ++d) x.set(b, h, t, d, (t + d) % 2 ? not_a_number : inf);
  });
}

template <class Real>
bool is_identity(const Real* sums, const Index* counts) {
  const Row<Real> row = load_row(sums, counts), none;
  return row.max == none.max && row.l == 0 && row.h == 0 && row.e2 == 0 && row.mean == 0 && row.m2 == 0 && row.min == none.min &&
         row.first == none.first && row.count == 0 && row.argmax == no_key;
}

void check_forward(Inputs& in, Problem problem, int threads, bool statistics) {
  const Case& c = in.c;
  const std::string what = text(c);
  const Index* lengths = problem.scoring.query_lengths;
  problem.scoring.query_lengths = nullptr;
  const Forward whole = forward_of(in, problem, threads, statistics);
  problem.scoring.query_lengths = lengths;
  poison(in, problem, in.q, c.D);
  if (c.mask == Mask::bias && c.seed % 2) poison(in, problem, in.mask, c.S);  // else batch rows share it
  const Forward some = forward_of(in, problem, threads, statistics);
  for_rows(c, [&](Index b, Index h, Index t, Index i) {
    const bool exists = problem.scoring.has_query(b, t);
    for (Index e = 0; e < c.E; ++e) {
      const double got = some.out.get(b, h, t, e), expected = exists ? whole.out.get(b, h, t, e) : 0;
      CHECK(got == expected, "out b%d h%d t%d: %g, expected %g | %s", int(b), int(h), int(t), got, expected, what.c_str());
    }
    const auto dead = [&](auto real) {
      using Real = decltype(real);
      CHECK(*some.logsumexp.row<Real>(i) == Real(-inf), "logsumexp t%d | %s", int(t), what.c_str());
      if (!statistics) return;
      CHECK(is_identity(some.sums.row<Real>(i), some.counts.row<Index>(i)), "state t%d | %s", int(t), what.c_str());
      for (Index e = 0; e < c.E; ++e) CHECK(some.acc.row<Real>(i)[e] == 0, "acc t%d | %s", int(t), what.c_str());
    };
    if (!exists) return c.dtype == DType::f64 ? dead(double{}) : dead(float{});
    CHECK(some.logsumexp.same(whole.logsumexp, i), "logsumexp of t%d | %s", int(t), what.c_str());
    if (statistics)
      CHECK(some.sums.same(whole.sums, i) && some.counts.same(whole.counts, i) && some.acc.same(whole.acc, i), "state of t%d | %s",
            int(t), what.c_str());
  });
}

// ---- gradients ----

struct Backward {
  Array dq, dk, dv, dmask;
  std::vector<double> dsinks, dscale, dadditive;
};

Backward backward_of(Inputs& in, const Problem& problem, Array& dout, std::vector<double>& dlogsumexp, int threads) {
  const Case& c = in.c;
  Forward given = forward_of(in, problem, 1, false);
  const DType real = c.dtype == DType::f64 ? DType::f64 : DType::f32;
  Backward o{{c.dtype, c.B, c.H, c.T, c.D, c.layout}, {c.dtype, c.B, c.G, c.S, c.D, c.layout}, {c.dtype, c.B, c.G, c.S, c.E, c.layout},
             {real, c.B, c.H, c.T, c.S}, {}, {}, {}};
  for (Array* x : {&o.dq, &o.dk, &o.dv}) x->fill([] { return 77; });
  o.dsinks.assign(at(c.H), 77), o.dscale.assign(at(c.H), 77), o.dadditive.assign(at(c.D), 77);
  std::vector<float> narrow(dlogsumexp.begin(), dlogsumexp.end());
  Gradients g;
  g.out = given.out.view<Tensor>(), g.dout = dout.view<Tensor>();
  g.logsumexp = given.logsumexp.bytes.data();
  g.dlogsumexp = real == DType::f64 ? static_cast<const void*>(dlogsumexp.data()) : narrow.data();
  g.dq = o.dq.view<MutableTensor>(), g.dk = o.dk.view<MutableTensor>(), g.dv = o.dv.view<MutableTensor>();
  if (c.mask == Mask::bias) g.dmask = o.dmask.view<MutableTensor>();
  if (c.sinks) g.sinks = in.sinks.data(), g.dsinks = o.dsinks.data();
  if (problem.scoring.additive) g.dadditive = o.dadditive.data();
  g.dscale = o.dscale.data();
  Interrupt never;
  CHECK(backward(problem, g, threads, never));
  return o;
}

// With lengths and anything in the rows that do not exist, against: without lengths and with dout zero there.
void check_backward(Inputs& in, Problem problem, int threads) {
  const Case& c = in.c;
  const std::string what = text(c);
  const Index* lengths = problem.scoring.query_lengths;
  std::normal_distribution<double> normal;
  Array dout(c.dtype, c.B, c.H, c.T, c.E, c.layout);
  std::vector<double> dlogsumexp(at(c.B * c.H * c.T));
  for_rows(c, [&](Index b, Index h, Index t, Index i) {
    const bool exists = problem.scoring.has_query(b, t);
    for (Index e = 0; e < c.E; ++e) dout.set(b, h, t, e, exists ? normal(in.random) : 0);
    dlogsumexp[at(i)] = exists ? normal(in.random) : 0;
  });
  problem.scoring.query_lengths = nullptr;
  const Backward whole = backward_of(in, problem, dout, dlogsumexp, threads);
  problem.scoring.query_lengths = lengths;
  poison(in, problem, in.q, c.D);
  poison(in, problem, dout, c.E);
  if (c.mask == Mask::bias && c.seed % 2) poison(in, problem, in.mask, c.S);  // else batch rows share it
  for_rows(c, [&](Index b, Index, Index t, Index i) {
    if (!problem.scoring.has_query(b, t)) dlogsumexp[at(i)] = t % 2 ? not_a_number : inf;
  });
  const Backward some = backward_of(in, problem, dout, dlogsumexp, threads);
  for_rows(c, [&](Index b, Index h, Index t, Index) {
    const bool exists = problem.scoring.has_query(b, t);
    for (Index d = 0; d < c.D; ++d) {
      const double got = some.dq.get(b, h, t, d), expected = exists ? whole.dq.get(b, h, t, d) : 0;
      CHECK(got == expected || (std::isnan(got) && std::isnan(expected)), "dq t%d: %g, expected %g | %s", int(t), got, expected, what.c_str());
    }
    for (Index j = 0; c.mask == Mask::bias && j < c.S; ++j) {
      const double got = some.dmask.get(b, h, t, j), expected = exists ? whole.dmask.get(b, h, t, j) : 0;
      CHECK(got == expected, "dmask t%d: %g, expected %g | %s", int(t), got, expected, what.c_str());
    }
  });
  // A sum over queries may be cut into other pieces.
  const double unit = (c.dtype == DType::f64 ? 1e-12 : c.dtype == DType::f32 ? 1e-4 : 1e-1) * std::max(1.0, c.factor * c.factor);
  const auto near = [&](const char* name, double got, double expected) {
    CHECK(std::abs(got - expected) <= unit * (1 + std::abs(expected)), "%s: %.9g, expected %.9g | %s", name, got, expected, what.c_str());
  };
  for (Index b = 0; b < c.B; ++b)
    for (Index g = 0; g < c.G; ++g)
      for (Index j = 0; j < c.S; ++j) {
        for (Index d = 0; d < c.D; ++d) near("dk", some.dk.get(b, g, j, d), whole.dk.get(b, g, j, d));
        for (Index e = 0; e < c.E; ++e) near("dv", some.dv.get(b, g, j, e), whole.dv.get(b, g, j, e));
      }
  for (Index h = 0; h < c.H; ++h) {
    near("dscale", some.dscale[at(h)], whole.dscale[at(h)]);
    if (c.sinks && in.sinks[at(h)] > -inf) near("dsinks", some.dsinks[at(h)], whole.dsinks[at(h)]);
  }
  for (Index a = 0; problem.scoring.additive && a < c.D; ++a) near("dadditive", some.dadditive[at(a)], whole.dadditive[at(a)]);
}

Case drawn(DType dtype, unsigned seed) {
  Case c = random_case(dtype, seed);
  c.values = true, c.query_lengths = true;
  return c;
}

}  // namespace

TEST(forward_with_options_at_random) {
  on_every_isa([](DType dtype) {
    for (unsigned seed = 600; seed < 600 + draws / 2; ++seed) {
      Inputs in(drawn(dtype, seed));
      check_forward(in, in.problem(), seed % 3 == 0 ? 2 : 1, seed % 2 == 0);
    }
  });
}

TEST(half_types) {
  on_every_isa([](DType dtype) {
    if (dtype == DType::f64) return;
    for (DType half : {DType::f16, DType::bf16})
      for (unsigned seed = 800; seed < 800 + draws / 10; ++seed) {
        Inputs in(drawn(half, seed));
        check_forward(in, in.problem(), 1, seed % 2 == 0);
      }
  });
}

TEST(many_queries_and_every_length) {  // shared packs, whole heads, whole strips without a query
  on_every_isa([](DType dtype) {
    for (Index length : {-3, 1, 12, 13, 100, 149, 151})
      for (int threads : {1, 2}) {
        Case c{.dtype = dtype, .B = 2, .H = 4, .G = 2, .T = 150, .S = 70, .D = 16, .E = 16, .causal = length % 2 == 0};
        c.query_lengths = c.sinks = true;
        Inputs in(c);
        in.query_lengths = {length, 150 - length};
        check_forward(in, in.problem(), threads, length % 3 == 0);
      }
  });
}

TEST(decoding) {  // few queries: keys are split, streamed where there are very few
  on_every_isa([](DType dtype) {
    for (Index T : {1, 4, 16})
      for (Index group : {1, 2}) {
        Case c{.dtype = dtype, .B = 3, .H = group, .G = 1, .T = T, .S = 1100, .D = 16, .E = 16};
        c.query_lengths = c.sinks = true;
        Inputs in(c);
        in.query_lengths = {T, T / 2, 0};
        check_forward(in, in.problem(), 2, group == 2);
      }
  });
}

TEST(positions_in_runs) {  // a length counts positions of the whole sequence, not rows of this part
  on_every_isa([](DType dtype) {
    for (bool scattered : {false, true}) {
      Case c{.dtype = dtype, .B = 2, .H = 2, .G = 1, .T = 60, .S = 80, .D = 8, .E = 8, .causal = true, .left = 40, .alibi = true};
      c.query_lengths = true, c.mask = Mask::bias;
      Inputs in(c), again(c);
      for (Inputs* each : {&in, &again}) each->query_lengths = {70, 25};
      const Run queries[] = {{1, 20, 4}, {79, 20, -1}, {0, 20, 2}};  // striped, falling, striped
      const Run keys[] = {{40, 40, 1}, {0, 40, 1}};
      const auto placed = [&](Inputs& of) {
        Problem problem = of.problem();
        problem.scoring.queries = {queries, 3, of.starts.data()};
        if (scattered) problem.scoring.keys = {keys, 2, nullptr};
        return problem;
      };
      check_forward(in, placed(in), 2, true);
      check_backward(again, placed(again), 2);
      CHECK(placed(in).scoring.has_query(0, 17) && !placed(in).scoring.has_query(0, 20));
    }
  });
}

TEST(backward_with_options_at_random) {
  on_every_isa([](DType dtype) {
    for (unsigned seed = 900; seed < 900 + draws / 3; ++seed) {
      Inputs in(drawn(dtype, seed));
      check_backward(in, in.problem(), seed % 3 == 0 ? 2 : 1);
    }
  });
}

TEST(backward_of_additive_attention) {
  on_every_isa([](DType dtype) {
    if (dtype == DType::bf16) return;
    for (unsigned seed = 1000; seed < 1000 + draws / 10; ++seed) {
      Case c = drawn(dtype, seed);
      c.cosine = false;
      Inputs in(c);
      std::vector<double> weights(at(c.D));
      for (double& w : weights) w = 0.01 * static_cast<double>(in.random() % 100);
      std::vector<float> narrow(weights.begin(), weights.end());
      Problem problem = in.problem();
      problem.scoring.additive = dtype == DType::f64 ? static_cast<const void*>(weights.data()) : narrow.data();
      check_backward(in, problem, 1);
    }
  });
}

TEST(no_query_at_all) {
  on_every_isa([](DType dtype) {
    Case c{.dtype = dtype, .B = 2, .H = 2, .G = 1, .T = 30, .S = 40, .D = 8, .E = 8, .sinks = true};
    c.query_lengths = true;
    for (Index length : {0, -1}) {
      Inputs in(c), again(c);
      in.query_lengths = again.query_lengths = {length, length};
      check_forward(in, in.problem(), 2, true);
      check_backward(again, again.problem(), 2);
    }
  });
}
