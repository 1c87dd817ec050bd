// forward() against the definition (oracle.h), on every ISA this CPU can run; and the promises that need no
// tolerance: same bits for any threads, layout or batch, whatever hidden keys hold.

#include <memory>
#include <string>

#include "cases.h"
#include "check.h"
#include "dispatch.h"
#include "oracle.h"
#include "state.h"
#include "threads.h"
#if defined(LEVELHEAD_X86)
#include "cpu.h"
#endif

using namespace levelhead;
using oracle::at, oracle::Array, oracle::Case, oracle::Index, oracle::Inputs, oracle::Layout, oracle::Mask;
using oracle::inf, oracle::not_a_number;
using cases::draws, cases::on_every_isa, cases::random_case, cases::text;

namespace {

// Everything forward() can write. The state is float or double as the core computes, read here as double.
struct Outputs {
  Array out;
  std::vector<float> sums32, acc32;
  std::vector<double> sums64, acc64;
  std::vector<Index> counts;
  bool wide = false, finished = false;

  double sum(Index row, int i) const { return value(sums32, sums64, row * row_sums + i); }
  double acc(Index i) const { return value(acc32, acc64, i); }
  const void* acc_data() const { return wide ? static_cast<const void*>(acc64.data()) : acc32.data(); }
  const void* sums_data() const { return wide ? static_cast<const void*>(sums64.data()) : sums32.data(); }

  friend bool operator==(const Outputs& a, const Outputs& b) {
    const auto same = [](const auto& x, const auto& y) {
      return x.size() == y.size() && (x.empty() || !std::memcmp(x.data(), y.data(), x.size() * sizeof x[0]));
    };
    return same(a.out.bytes(), b.out.bytes()) && same(a.sums32, b.sums32) && same(a.sums64, b.sums64) &&
           same(a.acc32, b.acc32) && same(a.acc64, b.acc64) && same(a.counts, b.counts);
  }

 private:
  double value(const std::vector<float>& narrow, const std::vector<double>& full, Index i) const {
    return wide ? full[at(i)] : static_cast<double>(narrow[at(i)]);
  }
};

struct Wanted {
  bool out = true, state = true;
  int threads = 1;
};

Outputs run(Inputs& in, Wanted wanted = {}) {
  const Case& c = in.c;
  const Index rows = c.B * c.H * c.T, E = c.values ? c.E : 0;
  Outputs o;
  o.wide = c.dtype == DType::f64;
  Result result;
  if (wanted.out && c.values) {
    o.out = {c.dtype, c.B, c.H, c.T, c.E, c.layout};
    o.out.fill([] { return 77; });  // not a result: where it is left, nothing was written
    result.out = o.out.view<MutableTensor>();
    if (c.sinks) result.sinks = in.sinks.data();
  }
  if (wanted.state) {
    o.counts.assign(at(rows * row_counts), 77);
    const auto reserve = [&](auto& sums, auto& acc) {
      sums.assign(at(rows * row_sums), 77), acc.assign(at(rows * E), 77);
      result.sums = sums.data(), result.counts = o.counts.data();
      if (c.values) result.acc = acc.data();
    };
    o.wide ? reserve(o.sums64, o.acc64) : reserve(o.sums32, o.acc32);
  }
  Interrupt never;
  o.finished = forward(in.problem(), result, wanted.threads, never);
  return o;
}

// What storing in `dtype` loses, relative.
double storage_error(DType dtype) {
  return dtype == DType::f16 ? 0x1p-11 : dtype == DType::bf16 ? 0x1p-8 : 0;
}

// Where bfloat16 is multiplied as it is, each weight is rounded to it before it meets its value; relative.
double weight_error(DType dtype) { return dtype == DType::bf16 && current_isa() == "avx512bf16" ? 0x1p-9 : 0; }

// Fields of one row. Bounds are those the design promises for float; double gets them times 2^-29.
void check_row(const Outputs& o, const oracle::RowTruth& truth, Index row, const std::string& what) {
  const double unit = 1e-5 * (o.wide ? 0x1p-29 : 1);
  const double M = truth.count ? std::max(std::abs(truth.max), std::abs(truth.min)) : 0;
  const double n = static_cast<double>(truth.count);
  const double tolerance = unit * (1 + M);
  const auto near = [&](double a, double b, double bound) { return a == b || std::abs(a - b) <= bound; };
  const auto field = [&](const char* name, double got, double expected, double bound) {
    CHECK(near(got, expected, bound), "%s row %lld: got %.9g, expected %.9g | %s", name,
          static_cast<long long>(row), got, expected, what.c_str());
  };
  CHECK(o.counts[at(row * row_counts)] == truth.count, "count | %s", what.c_str());
  const Index argmax = o.counts[at(row * row_counts + 1)];
  if (truth.count == 0)
    CHECK(argmax == no_key, "argmax of nothing | %s", what.c_str());
  else
    CHECK(argmax >= 0 && argmax < static_cast<Index>(truth.s.size()) && truth.s[at(argmax)] >= truth.max - tolerance,
          "argmax %lld | %s", static_cast<long long>(argmax), what.c_str());
  // The state's logits are in units of ln 2, the oracle's are natural.
  const double max = o.sum(row, 0) * ln_2, l = o.sum(row, 1), h = o.sum(row, 2) * ln_2;
  field("max", max, truth.max, tolerance);
  field("min", o.sum(row, 6) * ln_2, truth.min, tolerance);
  field("first", o.sum(row, 7) * ln_2, truth.first, tolerance);
  field("mean", o.sum(row, 4) * ln_2, truth.mean, tolerance);
  field("m2", o.sum(row, 5) * ln_2 * ln_2, truth.m2, n * unit * (truth.m2 / std::max(n, 1.0) + M));
  field("e2", o.sum(row, 3), truth.e2, tolerance * truth.e2);
  if (truth.count == 0) {
    CHECK(l == 0 && h == 0, "identity | %s", what.c_str());
    return;
  }
  field("logsumexp", max + std::log(l), truth.max + std::log(truth.l), tolerance);
  field("entropy", std::log(l) - h / l, std::log(truth.l) - truth.h / truth.l, tolerance);
}

void check_case(const Case& c) {
  Inputs in(c);
  const Outputs o = run(in);
  const std::string what = text(c);
  CHECK(o.finished);
  const double unit = 1e-5 * (o.wide ? 0x1p-29 : 1);
  for (Index b = 0; b < c.B; ++b)
    for (Index h = 0; h < c.H; ++h)
      for (Index t = 0; t < c.T; ++t) {
        const oracle::RowTruth truth = oracle::attend(in, b, h, t);
        check_row(o, truth, (b * c.H + h) * c.T + t, what);
        const double M = truth.count ? std::max(std::abs(truth.max), std::abs(truth.min)) : 0;
        for (Index e = 0; e < static_cast<Index>(truth.out.size()); ++e) {
          const double got = o.out.get(b, h, t, e), expected = truth.out[at(e)];  // |v| < 6
          const double stored = storage_error(c.dtype) * (std::abs(expected) + 1e-4);
          const double bound = 6 * (unit * (1 + M) + weight_error(c.dtype)) / (1 - c.dropout) + stored;
          CHECK(truth.count ? std::abs(got - expected) <= bound : got == 0,
                "out[%lld,%lld,%lld,%lld] %.9g, expected %.9g | %s",
                static_cast<long long>(b), static_cast<long long>(h), static_cast<long long>(t),
                static_cast<long long>(e), got, expected, what.c_str());
        }
      }
  if (!c.values) return;
  // finish() reads the same bits off the state, and asking for no statistics changes none.
  Array again(c.dtype, c.B, c.H, c.T, c.E, c.layout);
  again.fill([] { return 77; });
  finish({c.B, c.H, c.T, c.E, o.wide ? DType::f64 : DType::f32, o.acc_data(), o.sums_data()},
         c.sinks ? in.sinks.data() : nullptr, again.view<MutableTensor>());
  CHECK(again.bytes() == o.out.bytes(), "finish() | %s", what.c_str());
  CHECK(run(in, {.state = false}).out.bytes() == o.out.bytes(), "without statistics | %s", what.c_str());
}

}  // namespace

TEST(sizes_around_tiles) {
  on_every_isa([](DType dtype) {
    for (Index T : {1, 5, 6, 7, 12, 13, 48, 49})
      for (Index S : {1, 15, 16, 17, 33}) check_case({.dtype = dtype, .T = T, .S = S, .D = 5, .E = 9});
    for (Index D : {1, 15, 16, 17, 64})
      for (Index E : {1, 15, 16, 17, 31, 32, 33}) check_case({.dtype = dtype, .T = 7, .S = 19, .D = D, .E = E});
  });
}

TEST(options_at_random) {
  on_every_isa([](DType dtype) {
    for (unsigned seed = 1; seed <= draws; ++seed) check_case(random_case(dtype, seed));
  });
}

TEST(queries_that_do_not_exist) {  // test_query_lengths.cpp has what they hold, and gradients
  on_every_isa([](DType dtype) {
    for (unsigned seed = 1; seed <= draws; ++seed) {
      Case c = random_case(dtype, seed);
      c.query_lengths = true;
      check_case(c);
    }
  });
}

TEST(several_key_blocks) {  // wide vectors make plan.h cut keys into blocks of 64
  on_every_isa([](DType dtype) {
    for (Index S : {63, 64, 65, 200}) {
      Case c{.dtype = dtype, .T = 7, .S = S, .D = 600, .E = 500};
      check_case(c);
      c.causal = true, c.left = 70, c.mask = Mask::bias;
      check_case(c);
      c.segments = c.lengths = true, c.mask = Mask::boolean;
      check_case(c);
    }
  });
}

TEST(few_rows_over_many_keys) {  // up to a strip they are read in place, beyond it packed; in stretches of 1024
  on_every_isa([](DType own) {
    for (DType dtype : {own, DType::f16, DType::bf16})
      for (Index group : {1, 2, 5, 6, 12, 13})
        for (Index S : {15, 1027})
          check_case(Case{.dtype = dtype, .H = group, .G = 1, .T = 1, .S = S, .D = 40, .E = S < 16 ? 48 : 33, .causal = true,
                          .seed = static_cast<unsigned>(group)});
  });
}

TEST(half_types) {
  on_every_isa([](DType dtype) {
    if (dtype == DType::f64) return;
    for (DType half : {DType::f16, DType::bf16})
      for (unsigned seed = 200; seed < 200 + draws / 5; ++seed) check_case(random_case(half, seed));
  });
}

TEST(empty_dimensions) {
  on_every_isa([](DType dtype) {
    const Case whole{.dtype = dtype, .B = 2, .H = 2, .G = 1, .T = 3, .S = 4, .D = 5, .E = 6};
    for (Index Case::*size : {&Case::B, &Case::T, &Case::S, &Case::D, &Case::E}) {
      Case c = whole;
      c.*size = 0;
      check_case(c);
      c.causal = c.sinks = true;
      check_case(c);
    }
    Case headless = whole;
    headless.H = headless.G = 0;
    check_case(headless);
  });
}

TEST(same_bits_for_any_threads) {
  on_every_isa([](DType dtype) {
    Case cases[] = {{.dtype = dtype, .B = 2, .H = 4, .G = 2, .T = 130, .S = 140, .D = 16, .E = 20, .causal = true},
                    {.dtype = dtype, .B = 1, .H = 1, .G = 1, .T = 400, .S = 90, .D = 8, .E = 8, .mask = Mask::bias},
                    {.dtype = dtype, .B = 5, .H = 6, .G = 3, .T = 3, .S = 30, .D = 8, .E = 8, .dropout = 0.5},
                    {.dtype = dtype, .B = 1, .H = 2, .G = 1, .T = 20, .S = 300, .D = 600, .E = 300, .segments = true}};
    for (const Case& c : cases) {
      Inputs in(c);
      const Outputs alone = run(in);
      for (int threads : {2, 3, 7})
        CHECK(run(in, {.threads = threads}) == alone, "threads %d | %s", threads, text(c).c_str());
    }
  });
}

TEST(same_bits_for_any_layout) {
  on_every_isa([](DType dtype) {
    for (unsigned seed = 300; seed < 300 + draws / 10; ++seed) {
      Case c = random_case(dtype, seed);
      c.layout = Layout::contiguous, c.values = true;
      Inputs plain(c);
      const Outputs expected = run(plain);
      for (Layout layout : {Layout::tokens_first, Layout::reversed, Layout::columns_apart, Layout::misaligned}) {
        c.layout = layout;
        Inputs in(c);
        const Outputs got = run(in);
        CHECK(got.sums32 == expected.sums32 && got.sums64 == expected.sums64 && got.acc32 == expected.acc32 &&
                  got.acc64 == expected.acc64 && got.counts == expected.counts, "%s", text(c).c_str());
        for (Index b = 0; b < c.B; ++b)
          for (Index h = 0; h < c.H; ++h)
            for (Index t = 0; t < c.T; ++t)
              for (Index e = 0; e < c.E; ++e)
                CHECK(got.out.get(b, h, t, e) == expected.out.get(b, h, t, e), "%s", text(c).c_str());
      }
    }
  });
}

TEST(same_bits_alone_and_in_a_batch) {
  on_every_isa([](DType dtype) {
    Case c{.dtype = dtype, .B = 3, .H = 4, .G = 2, .T = 60, .S = 70, .D = 16, .E = 17, .causal = true, .lengths = true};
    Inputs in(c);
    const Outputs together = run(in, {.threads = 3});
    for (Index b = 0; b < c.B; ++b) {
      Array out(dtype, 1, c.H / c.G, c.T, c.E);
      for (Index g = 0; g < c.G; ++g) {  // one kv head and its query heads
        Problem problem = in.problem();
        problem.B = 1, problem.H = c.H / c.G, problem.G = 1;
        problem.q.data = problem.q.at(b, g * problem.H, 0);
        problem.k.data = problem.k.at(b, g, 0), problem.v.data = problem.v.at(b, g, 0);
        problem.scoring.scale += g * problem.H, problem.scoring.key_lengths += b;
        problem.scoring.queries.batch_start += b;
        Result result;
        result.out = out.view<MutableTensor>();
        Interrupt never;
        CHECK(forward(problem, result, 1, never));
        for (Index h = 0; h < problem.H; ++h)
          for (Index t = 0; t < c.T; ++t)
            for (Index e = 0; e < c.E; ++e)
              CHECK(out.get(0, h, t, e) == together.out.get(b, g * problem.H + h, t, e), "b %d g %d", int(b), int(g));
      }
    }
  });
}

TEST(hidden_keys_may_hold_anything) {
  on_every_isa([](DType dtype) {
    for (unsigned seed = 400; seed < 400 + draws / 2; ++seed) {
      Case c = random_case(dtype, seed);
      c.values = true;
      Inputs in(c);
      const Outputs clean = run(in);
      int poisoned = 0;
      for (Index b = 0; b < c.B; ++b)
        for (Index g = 0; g < c.G; ++g)
          for (Index j = 0; j < c.S; ++j) {
            bool seen = false;
            for (Index h = g * (c.H / c.G); h < (g + 1) * (c.H / c.G); ++h)
              for (Index t = 0; t < c.T; ++t) seen = seen || in.visible(b, h, t, j);
            if (seen) continue;
            ++poisoned;
            const double poison = j % 3 == 0 ? not_a_number : j % 3 == 1 ? inf : -inf;
            for (Index d = 0; d < c.D; ++d) in.k.set(b, g, j, d, poison);
            for (Index e = 0; e < c.E; ++e) in.v.set(b, g, j, e, poison);
          }
      CHECK(run(in) == clean, "%d poisoned keys | %s", poisoned, text(c).c_str());
    }
  });
}

// A poisoned key is visible to some rows: those are NaN, all others have the bits they had.
TEST(visible_nan_stays_in_its_rows) {
  on_every_isa([](DType dtype) {
    for (unsigned seed = 500; seed < 500 + draws / 5; ++seed) {
      Case c = random_case(dtype, seed);
      c.values = true, c.dropout = 0, c.log_n = false;
      const Index j = c.S / 2;
      for (bool in_values : {true, false}) {
        Inputs in(c);
        const Outputs clean = run(in);
        for (Index b = 0; b < c.B; ++b)
          for (Index g = 0; g < c.G; ++g)
            in_values ? in.v.set(b, g, j, 0, not_a_number) : in.k.set(b, g, j, 0, not_a_number);
        const Outputs got = run(in);
        for (Index b = 0; b < c.B; ++b)
          for (Index h = 0; h < c.H; ++h)
            for (Index t = 0; t < c.T; ++t) {
              const Index row = (b * c.H + h) * c.T + t;
              const bool hit = in.visible(b, h, t, j);
              const double was = clean.out.get(b, h, t, 0), is = got.out.get(b, h, t, 0);
              CHECK(hit ? std::isnan(is) : is == was, "row %d: %g, was %g | %s", int(row), is, was, text(c).c_str());
              CHECK(got.counts[at(row * 2)] == clean.counts[at(row * 2)], "count | %s", text(c).c_str());
              for (int i = 0; i < 7; ++i)
                CHECK(hit && !in_values ? std::isnan(got.sum(row, i)) : got.sum(row, i) == clean.sum(row, i),
                      "sum %d row %d: %g | %s", i, int(row), got.sum(row, i), text(c).c_str());
              if (hit && !in_values) CHECK(got.counts[at(row * 2 + 1)] == no_key, "%s", text(c).c_str());
            }
      }
    }
  });
}

TEST(halves_of_the_keys_merge_to_the_whole) {  // key runs give the second half its true positions
  on_every_isa([](DType dtype) {
    const Case c{.dtype = dtype, .T = 30, .S = 90, .D = 8, .E = 4, .causal = true, .left = 50, .alibi = true};
    Inputs in(c);
    const Outputs whole = run(in);
    const auto check = [&](auto real) {
      using Real = decltype(real);
      const Index cut = 37, rows = c.T;
      const double unit = 1e-4 * (whole.wide ? 0x1p-29 : 1);
      std::vector<Real> sums[2], acc[2];
      std::vector<Index> counts[2];
      for (int half = 0; half < 2; ++half) {
        Problem problem = in.problem();
        const Index from = half ? cut : 0;
        problem.S = half ? c.S - cut : cut;
        problem.k.data = problem.k.at(0, 0, from), problem.v.data = problem.v.at(0, 0, from);
        const Run run_of_keys{from, problem.S, 1};
        problem.scoring.keys = {&run_of_keys, 1, nullptr};
        sums[half].resize(at(rows * row_sums)), acc[half].resize(at(rows * c.E));
        counts[half].resize(at(rows * row_counts));
        Result result;
        result.sums = sums[half].data(), result.acc = acc[half].data(), result.counts = counts[half].data();
        Interrupt never;
        CHECK(forward(problem, result, 2, never));
      }
      for (Index t = 0; t < rows; ++t) {
        const auto load = [&](int half) {
          return load_row(&sums[half][at(t * row_sums)], &counts[half][at(t * row_counts)]);
        };
        Row<Real> row = load(0);
        const Share<Real> share = merge(row, load(1));
        const Real sums_of_both[] = {row.max, row.l, row.h, row.e2, row.mean, row.m2, row.min, row.first};
        for (int i = 0; i < row_sums; ++i) {
          const double got = static_cast<double>(sums_of_both[i]), expected = whole.sum(t, i);
          CHECK(got == expected || std::abs(got - expected) <= unit * (1 + std::abs(expected)), "sum %d: %g %g", i,
                got, expected);
        }
        CHECK(row.count == whole.counts[at(t * 2)] && row.argmax == whole.counts[at(t * 2 + 1)]);
        for (Index e = 0; e < c.E; ++e) {
          const Real joined = acc[0][at(t * c.E + e)] * share.a + acc[1][at(t * c.E + e)] * share.b;
          CHECK(std::abs(static_cast<double>(joined / row.l) - whole.acc(t * c.E + e) / whole.sum(t, 1)) <= unit);
        }
      }
    };
    dtype == DType::f64 ? check(double{}) : check(float{});
  });
}

TEST(exp2_within_two_ulp) {
  on_every_isa([](DType dtype) {
    const auto check = [&](auto real) {
      using Real = decltype(real);
      const Real smallest = std::numeric_limits<Real>::min();
      std::vector<Real> x = {0, Real(-0.0), -1, Real(-inf), Real(-1e30), Real(not_a_number), std::log2(smallest)}, y;
      for (Real v = Real(-1e-8); v > -1100; v *= Real(1.003)) x.push_back(v);
      y.resize(x.size());
      exponential(dtype, x.data(), y.data(), static_cast<Index>(x.size()));
      for (std::size_t i = 0; i < x.size(); ++i) {
        const long double exact = std::exp2(static_cast<long double>(x[i]));
        const Real nearest = static_cast<Real>(exact);
        const Real ulp = std::nextafter(nearest, Real(2)) - nearest;
        const bool fine = std::isnan(x[i]) ? std::isnan(y[i])
                          : exact < 2 * smallest ? y[i] == 0 || std::abs(y[i] - exact) <= 2 * ulp  // denormals become 0
                                                 : std::abs(y[i] - exact) <= 2 * static_cast<long double>(ulp);
        CHECK(fine && !(y[i] > 0 && y[i] < smallest), "%s: 2^%.9g = %.9g, exactly %.9Lg", current_isa().c_str(),
              static_cast<double>(x[i]), static_cast<double>(y[i]), exact);
      }
      CHECK(y[0] == 1 && y[1] == 1 && y[3] == 0 && y[4] == 0);
    };
    dtype == DType::f64 ? check(double{}) : check(float{});
  });
}

TEST(stops_when_interrupted) {
  on_every_isa([](DType dtype) {
    Inputs in({.dtype = dtype, .H = 2, .G = 1, .T = 100, .S = 100});
    for (int threads : {1, 2}) {
      Array out(dtype, 1, 2, 100, 8);
      Result result;
      result.out = out.view<MutableTensor>();
      Interrupt interrupt;
      interrupt.stop();
      CHECK(!forward(in.problem(), result, threads, interrupt));
    }
  });
}

TEST(what_the_cpu_can_run_is_what_the_compiler_finds) {
#if defined(LEVELHEAD_X86)
  const Cpu cpu = this_cpu();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
  CHECK(cpu.avx2 == avx2 && cpu.avx512 == avx512);
  CHECK(cpu.avx512bf16 == (avx512 && __builtin_cpu_supports("avx512bf16")));
#else
  CHECK(available_isas() == built_isas());  // the one there is runs on all of them
#endif
}

TEST(unknown_isa_is_an_error_that_names_the_known) {
  const std::string before = current_isa();
  std::string message;
  try {
    choose_isa("abacus");
  } catch (const std::exception& error) {
    message = error.what();
  }
  for (const char* name : {"abacus", "baseline"})
    CHECK(message.find(name) != std::string::npos, "%s", message.c_str());
  CHECK(current_isa() == before);
}
