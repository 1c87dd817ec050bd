// The command: runs the ladder, prints a table, writes JSON. docs/kernel.md says how it is used.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <stdexcept>

#include "race.h"
#include "written.h"

using namespace levelhead::ladder;
using Index = std::int64_t;

namespace {

constexpr const char* usage =
    "usage: ladder [--isa NAME] [--tokens N] [--width N]... [--step N]... [--rounds N] [--json FILE]\n"
    "       ladder --check\n"
    "Times every step from a plain loop to levelhead::forward, one head, one thread; then the parts of the last step\n"
    "before it. --check only compares each with double precision, on small sizes and every instruction set.\n";

struct Options {
  std::string isa = isas().back(), json;
  Index tokens = 1024;
  std::vector<Index> widths;
  std::vector<int> steps;
  Effort effort;
  bool check = false;
};

Index number(const std::string& word, const char* text) {
  char* end = nullptr;
  const long long n = std::strtoll(text, &end, 10);
  if (*end || end == text || n < (word == "--step" ? 0 : 1))
    throw std::invalid_argument(word + ": expected a positive number, got '" + text + "'");
  return n;
}

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
    else if (word == "--tokens") options.tokens = number(word, value);
    else if (word == "--width") options.widths.push_back(number(word, value));
    else if (word == "--step") options.steps.push_back(static_cast<int>(number(word, value)));
    else if (word == "--rounds") options.effort.rounds = static_cast<int>(number(word, value));
    else throw std::invalid_argument("'" + word + "' is no option");
  }
  std::string here;
  bool known = false;
  for (const std::string& name : isas()) here += " " + name, known = known || name == options.isa;
  if (!known) throw std::invalid_argument("--isa: expected one of" + here + ", got '" + options.isa + "'");
  const int last = core_step(options.isa) + part_count;
  if (options.steps.empty())
    for (int step = 0; step <= last; ++step) options.steps.push_back(step);
  for (const int step : options.steps)
    if (step > last) throw std::invalid_argument("--step: expected 0 to " + std::to_string(last));
  if (options.widths.empty()) options.widths = {64, 128};
  for (const Index width : options.widths)
    if (width % widths) throw std::invalid_argument("--width: expected a multiple of " + std::to_string(widths));
  return options;
}

// --- the table, and the same in JSON ---

std::vector<std::string> table(const Race& race) {
  std::vector<std::string> lines = {"| step | | ms, best | ms, median | gain | GFLOP/s | of FMA peak | largest error |",
                                    "|---|---|---|---|---|---|---|---|"};
  const Lap* before = nullptr;
  for (const Lap& lap : race.laps) {
    const bool part = std::isnan(lap.error);
    const double rate = lap.flops / lap.best();
    std::string line = text("| %s | %s |", lap.step.c_str(), lap.name.c_str());
    line += text(" %.2f | %.2f |", 1e3 * lap.best(), 1e3 * lap.median());
    line += before && !part ? text(" %.2f× |", before->best() / lap.best()) : " |";
    line += lap.flops > 0 ? text(" %.1f | %.0f %% |", 1e-9 * rate, 100 * rate / race.peak) : " | |";
    lines.push_back(line + (part ? " |" : text(" %.1e |", lap.error)));
    before = &lap;
  }
  return lines;
}

std::string lap_json(const Lap& lap, double peak) {
  const std::string error = std::isnan(lap.error) ? "null" : text("%.3g", lap.error);
  return text("\n    {\"step\": \"%s\", \"name\": \"%s\", \"best\": %.6g, \"median\": %.6g, \"gflops\": %.4g, "
              "\"of_peak\": %.4g, \"error\": %s,\n     \"samples\": ",
              lap.step.c_str(), lap.name.c_str(), lap.best(), lap.median(), 1e-9 * lap.flops / lap.best(),
              lap.flops / lap.best() / peak, error.c_str()) +
         list(lap.seconds, [](double s) { return text("%.5g", s); }) + "}";
}

int measure(const Options& options) {
  std::string races, tables;
  for (const Index d : options.widths) {
    const Race result = race(options.isa, Inputs(options.tokens, options.tokens, d), options.steps, options.effort);
    const std::string title = text("d %lld", static_cast<long long>(d));
    const std::vector<std::string> lines = table(result);
    std::printf("%s, %s, T = S = %lld, FMA peak %.1f GFLOP/s\n\n", options.isa.c_str(), title.c_str(),
                static_cast<long long>(options.tokens), 1e-9 * result.peak);
    for (const std::string& line : lines) std::printf("%s\n", line.c_str());
    std::printf("\n");
    races += text("%s\n  {\"d\": %lld, \"peak_gflops\": %.5g, \"steps\": ", races.empty() ? "" : ",",
                  static_cast<long long>(d), 1e-9 * result.peak) +
             list(result.laps, [&](const Lap& lap) { return lap_json(lap, result.peak); }) + "}";
    tables += text("%s\n  \"%s\": ", tables.empty() ? "" : ",", title.c_str()) +
              list(lines, [](const std::string& line) { return "\n    \"" + line + "\""; });
  }
  if (options.json.empty()) return 0;
  std::ofstream file(options.json);
  file << "{\"kind\": \"ladder\",\n \"date\": \"" << now() << "\",\n \"cpu\": \"" << cpu() << "\",\n \"compiler\": \""
       << __VERSION__ << "\",\n \"isa\": \"" << options.isa << "\",\n \"threads\": 1,\n \"tokens\": " << options.tokens
       << ",\n \"races\": [" << races << "],\n \"tables\": {" << tables << "}}\n";
  if (!file.flush()) throw std::runtime_error("cannot write " + options.json);
  return 0;
}

// --- are the steps right? ---

int check() {
  // Below a panel, at the edges of strips and blocks, beyond them.
  const Index sizes[][3] = {{1, 1, 32}, {5, 7, 64}, {12, 64, 32}, {13, 65, 96}, {96, 512, 32}, {109, 1100, 64}};
  constexpr double tolerance = 5e-6;
  int wrong = 0;
  for (const std::string& isa : isas())
    for (const auto& [T, S, d] : sizes) {
      std::vector<int> every;
      for (int step = 0; step <= core_step(isa); ++step) every.push_back(step);
      for (const Lap& lap : race(isa, Inputs(T, S, d), every, Effort{0, 0}).laps) {
        const bool right = lap.error <= tolerance;
        wrong += !right;
        std::printf("%s %s, T %lld, S %lld, d %lld, step %s: %.1e\n", right ? "ok    " : "FAILED", isa.c_str(),
                    static_cast<long long>(T), static_cast<long long>(S), static_cast<long long>(d),
                    lap.step.c_str(), lap.error);
      }
    }
  return wrong != 0;
}

}  // namespace

int main(int count, char** words) {
  try {
    const Options options = parse(count, words);
    return options.check ? check() : measure(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ladder: %s\n%s", error.what(), usage);
    return 2;
  }
}
