// The command: where the cycles of a dense head go, part by part, and what statistics add. Prints a table per width and
// writes JSON. docs/kernel.md says how it is used.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <vector>

#include "account.h"
#include "dispatch.h"
#include "frame.h"
#include "machine.h"
#include "race.h"
#include "state.h"
#include "written.h"

extern "C" {
extern const levelhead::ladder::Account levelhead_account_baseline;
#if defined(LEVELHEAD_X86)
extern const levelhead::ladder::Account levelhead_account_avx2, levelhead_account_avx512;
#endif
}

using namespace levelhead;
using namespace levelhead::ladder;
using Index = std::int64_t;

namespace {

constexpr const char* usage =
    "usage: account [--isa NAME] [--width N]... [--rounds N] [--json FILE]\n"
    "       account --check\n"
    "Counts the cycles of each part of levelhead::forward, one dense head of 1024 tokens, one thread. --check only compares\n"
    "the result of the parts with forward's, bit by bit, for every instruction set.\n";

const Account* const accounts[] = {
    &levelhead_account_baseline,
#if defined(LEVELHEAD_X86)
    &levelhead_account_avx2, &levelhead_account_avx512,
#endif
};
constexpr Index tokens = 1024;

struct Options {
  std::string isa = isas().back(), json;
  std::vector<Index> widths;
  int rounds = 200;
  bool check = false;
};

Options parse(int count, char** words) {
  Options options;
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i];
    if (word == "--check") {
      options.check = true;
      continue;
    }
    if (i + 1 == count) throw std::invalid_argument("'" + word + "' is no option, or needs a value");
    const char* value = words[++i];
    if (word == "--isa") options.isa = value;
    else if (word == "--json") options.json = value;
    else if (word == "--width") options.widths.push_back(std::atoll(value));
    else if (word == "--rounds") options.rounds = std::atoi(value);
    else throw std::invalid_argument("'" + word + "' is no option");
  }
  const std::vector<std::string> here = isas();
  if (std::find(here.begin(), here.end(), options.isa) == here.end())
    throw std::invalid_argument("--isa: '" + options.isa + "' does not run here");
  if (options.widths.empty()) options.widths = {64, 128};
  for (const Index width : options.widths)
    if (width < 1 || width % widths) throw std::invalid_argument("--width: expected a multiple of " + std::to_string(widths));
  if (options.rounds < 1) throw std::invalid_argument("--rounds: expected a positive number");
  return options;
}

const Account& account_of(const std::string& isa) {
  return **std::find_if(std::begin(accounts), std::end(accounts), [&](const Account* a) { return isa == a->isa; });
}

double timed(const auto& run) {
  const auto begin = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// The second of two runs: its memory is in the caches, whatever ran before.
double warm(const auto& run) {
  run();
  return timed(run);
}

// Additions that wait for each other take a cycle each, on every CPU.
double cycle() {
  constexpr std::int64_t additions = 1 << 16;
  std::int64_t x = 1, y = 3;
  const double seconds = timed([&] {
    for (std::int64_t i = 0; i < additions / 16; ++i) {
#pragma GCC unroll 16
      for (int k = 0; k < 16; ++k) {
        x += y;
        asm volatile("" : "+r"(x), "+r"(y));
      }
    }
  });
  return seconds / static_cast<double>(additions);
}

// One dense head as the core sees it.
class DenseHead {
 public:
  DenseHead(const Account& account, Index d)
      : account_(account),
        inputs_(tokens, tokens, d),
        out_(static_cast<std::size_t>(tokens * d)),
        head_(inputs_.head(out_.data())),
        scale_(head_.scale),
        problem_(problem()),
        plan_(make_plan(account.tile, {.group = 1, .T = tokens, .S = tokens, .D = d, .E = d, .real_bytes = sizeof(float),
                                       .streamable = true, .widened = false})),
        sums_(static_cast<std::size_t>(tokens * row_sums)),
        counts_(static_cast<std::size_t>(tokens * row_counts)),
        memory_(static_cast<std::size_t>(account.bytes(plan_) + 64)),
        frame_(problem_, &plain_, plan_, 1, never_) {
    plain_.out = rows(reinterpret_cast<char*>(head_.out));
    observed_ = plain_;
    observed_.sums = sums_.data();
    observed_.counts = counts_.data();
  }

  void run(Stage stage) {
    const auto at = reinterpret_cast<std::uintptr_t>(memory_.data());
    account_.run(frame_.job, stage, memory_.data() + (64 - at % 64) % 64);
  }
  void whole(bool statistics) { forward(problem_, statistics ? observed_ : plain_, 1, never_); }

  // Whether the parts compute what the whole does.
  bool same() {
    whole(false);
    const std::vector<float> right = out_;
    std::fill(out_.begin(), out_.end(), 0.0f);
    run(Stage::output);
    return out_ == right;
  }

 private:
  template <class Byte>
  View<Byte> rows(Byte* data) const {
    const Index step = head_.d * static_cast<Index>(sizeof(float));
    return {data, DType::f32, nullptr, 0, tokens * step, step, sizeof(float)};
  }
  Problem problem() const {
    const auto array = [&](const float* x) { return rows(reinterpret_cast<const char*>(x)); };
    Problem result{1, 1, 1, tokens, tokens, head_.d, head_.d, array(head_.q), array(head_.k), array(head_.v), {}};
    result.scoring.scale = &scale_;
    result.scoring.queries = {&run_, 1, nullptr};
    result.scoring.keys = {&run_, 1, nullptr};
    return result;
  }

  const Account& account_;
  const Inputs inputs_;
  std::vector<float> out_;
  const Head head_;
  const double scale_;
  const Run run_{0, tokens, 1};
  const Problem problem_;
  const Plan plan_;
  Result plain_, observed_;
  std::vector<float> sums_;
  std::vector<std::int64_t> counts_;
  std::vector<char> memory_;
  Interrupt never_;
  Frame frame_;
};

struct Part {
  const char* name;
  double cycles;
};

struct Found {
  double hertz, fmas;        // cycles per second; FMAs (of vectors) per cycle
  std::vector<Part> parts;   // whose sum is the whole
  double whole;
  std::vector<Part> observed;  // the same of what statistics add
  double added;
};

Found measured(const Account& account, Index d, int rounds) {
  DenseHead head(account, d);
  double times[stage_count], whole = 1e9, observed = 1e9, tick = 1e9, rate = 0;
  std::fill(std::begin(times), std::end(times), 1e9);
  for (int round = 0; round < rounds; ++round) {
    tick = std::min(tick, cycle());
    std::int64_t flops = 0;
    const double seconds = timed([&] { flops = burn(1 << 15, 1); });
    rate = std::max(rate, static_cast<double>(flops) / seconds);
    for (int stage = 0; stage < stage_count; ++stage)
      times[stage] = std::min(times[stage], warm([&] { head.run(static_cast<Stage>(stage)); }));
    whole = std::min(whole, warm([&] { head.whole(false); }));
    observed = std::min(observed, warm([&] { head.whole(true); }));
  }
  const auto at = [&](Stage stage) { return times[static_cast<int>(stage)] / tick; };
  const auto between = [&](Stage from, Stage to) { return at(to) - at(from); };
  const double product = 2.0 * tokens * tokens * static_cast<double>(d) / rate / tick;  // all FMAs of one product
  Found found{1 / tick, rate * tick / (static_cast<double>(account.tile.panel) / 2) / 2, {}, whole / tick, {}, (observed - whole) / tick};
  const double across = between(Stage::scores, Stage::softmax) - between(Stage::scores, Stage::exponentials);
  found.parts = {
      {"keys and values packed", at(Stage::pack)},
      {"strips and what they see", between(Stage::pack, Stage::spans)},
      {"scores: FMAs", product},
      {"scores: begin and end of tiles, loads", between(Stage::spans, Stage::scores) - product},
      {"softmax: first sweep, the maximum", between(Stage::scores, Stage::maxima)},
      {"softmax: second sweep, the exponentials", between(Stage::maxima, Stage::exponentials)},
      {"softmax: across lanes, states joined", across},
      {"values: FMAs", product},
      {"values: begin and end of tiles, loads, rescaling", between(Stage::softmax, Stage::values) - product},
      {"output divided and written", between(Stage::values, Stage::output)},
      {"the call, threads, memory", found.whole - at(Stage::output)},
  };
  found.observed = {{"sweeps", between(Stage::softmax, Stage::statistics)},
                    {"states written", found.added - between(Stage::softmax, Stage::statistics)}};
  return found;
}

std::vector<std::string> table(const Found& found) {
  std::vector<std::string> lines = {"| where | thousand cycles | of the whole | per score |", "|---|---|---|---|"};
  const auto line = [&](const char* name, double cycles) {
    lines.push_back(text("| %s | %.0f | %.1f %% | %.2f |", name, 1e-3 * cycles, 100 * cycles / found.whole,
                         cycles / double(tokens) / double(tokens)));
  };
  for (const Part& part : found.parts) line(part.name, part.cycles);
  line("**all of it**", found.whole);
  for (const Part& part : found.observed) line((std::string("statistics: ") + part.name).c_str(), part.cycles);
  return lines;
}

std::string json(const std::vector<Part>& parts) {
  return list(parts, [](const Part& part) { return text("\n    {\"name\": \"%s\", \"cycles\": %.6g}", part.name, part.cycles); });
}

int measure(const Options& options) {
  choose_isa(options.isa);
  std::string all, tables;
  for (const Index d : options.widths) {
    const Found found = measured(account_of(options.isa), d, options.rounds);
    const std::vector<std::string> lines = table(found);
    std::printf("%s, d %lld, T = S = %lld: %.2f GHz, %.2f FMAs of a vector per cycle\n\n", options.isa.c_str(),
                static_cast<long long>(d), static_cast<long long>(tokens), 1e-9 * found.hertz, found.fmas);
    for (const std::string& line : lines) std::printf("%s\n", line.c_str());
    std::printf("\n");
    all += text("%s\n  {\"d\": %lld, \"ghz\": %.4g, \"fmas_per_cycle\": %.4g, \"whole\": %.6g, \"added\": %.6g,\n   \"parts\": ",
                all.empty() ? "" : ",", static_cast<long long>(d), 1e-9 * found.hertz, found.fmas, found.whole, found.added) +
           json(found.parts) + ",\n   \"statistics\": " + json(found.observed) + "}";
    tables += text("%s\n  \"d %lld\": ", tables.empty() ? "" : ",", static_cast<long long>(d)) +
              list(lines, [](const std::string& line) { return "\n    \"" + line + "\""; });
  }
  if (options.json.empty()) return 0;
  std::ofstream file(options.json);
  file << "{\"kind\": \"account\",\n \"date\": \"" << now() << "\",\n \"cpu\": \"" << cpu() << "\",\n \"compiler\": \"" << __VERSION__
       << "\",\n \"isa\": \"" << options.isa << "\",\n \"threads\": 1,\n \"tokens\": " << tokens << ",\n \"rounds\": " << options.rounds
       << ",\n \"accounts\": [" << all << "],\n \"tables\": {" << tables << "}}\n";
  if (!file.flush()) throw std::runtime_error("cannot write " + options.json);
  return 0;
}

int check() {
  int wrong = 0;
  for (const std::string& isa : isas())
    for (const Index d : {Index(32), Index(64), Index(128)}) {
      choose_isa(isa);
      const bool right = DenseHead(account_of(isa), d).same();
      wrong += !right;
      std::printf("%s %s, d %lld\n", right ? "ok    " : "FAILED", isa.c_str(), static_cast<long long>(d));
    }
  return wrong != 0;
}

}  // namespace

int main(int count, char** words) {
  try {
    const Options options = parse(count, words);
    return options.check ? check() : measure(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "account: %s\n%s", error.what(), usage);
    return 2;
  }
}
