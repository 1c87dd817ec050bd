#include "race.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <random>

#include "dispatch.h"
#include "machine.h"

extern "C" {
extern const levelhead::ladder::Steps levelhead_ladder_baseline;
#if defined(LEVELHEAD_X86)
extern const levelhead::ladder::Steps levelhead_ladder_avx2, levelhead_ladder_avx512;
#endif
}

namespace levelhead::ladder {
namespace {

const Steps* const all_steps[] = {
    &levelhead_ladder_baseline,
#if defined(LEVELHEAD_X86)
    &levelhead_ladder_avx2, &levelhead_ladder_avx512,
#endif
};

const Steps& steps_of(const std::string& isa) {
  return **std::find_if(std::begin(all_steps), std::end(all_steps), [&](const Steps* s) { return isa == s->isa; });
}

// The truth is known for every n-th row: all of them in a small problem, few enough in a large one not to wait.
std::int64_t truth_step(std::int64_t T, std::int64_t S, std::int64_t d) {
  constexpr std::int64_t products = 1 << 23;
  const std::int64_t rows = std::max<std::int64_t>(1, products / (S * d));
  return (T + rows - 1) / rows;
}

template <class Int>
std::size_t at(Int i) {
  return static_cast<std::size_t>(i);
}

double timed(const std::function<void()>& run) {
  const auto begin = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double burn_rate() {
  constexpr std::int64_t rounds = 1 << 21;  // about ten milliseconds
  std::int64_t flops = 0;
  const double seconds = timed([&] { flops = burn(rounds, 1); });
  return static_cast<double>(flops) / seconds;
}

// A call this long is warmed up once, and a burst of such calls takes about this long in all.
constexpr double long_call = 0.1;

void burst(Lap& lap, const std::function<void()>& run, int calls) {
  const double first = timed(run);
  if (first < long_call) run();
  const int affordable = static_cast<int>(std::clamp(long_call / first, 1.0, static_cast<double>(calls)));
  for (int i = 0; i < affordable; ++i) lap.seconds.push_back(timed(run));
}

}  // namespace

Inputs::Inputs(std::int64_t T, std::int64_t S, std::int64_t d)
    : T_(T), S_(S), d_(d), step_(truth_step(T, S, d)), q_(at(T * d)), k_(at(S * d)), v_(at(S * d)) {
  std::mt19937 bits(1);
  std::normal_distribution<float> normal;
  for (auto* x : {&q_, &k_, &v_})
    for (float& number : *x) number = normal(bits);
  std::vector<double> s(at(S));
  const double scale = head(nullptr).scale;
  for (std::int64_t t = 0; t < T; t += step_) {
    double m = -INFINITY, l = 0;
    for (std::int64_t j = 0; j < S; ++j) {
      double dot = 0;
      for (std::int64_t c = 0; c < d; ++c) dot += double(q_[at(t * d + c)]) * double(k_[at(j * d + c)]);
      m = std::max(m, s[at(j)] = dot * scale);
    }
    for (double& x : s) l += x = std::exp(x - m);
    for (std::int64_t c = 0; c < d; ++c) {
      double total = 0;
      for (std::int64_t j = 0; j < S; ++j) total += s[at(j)] * double(v_[at(j * d + c)]);
      truth_.push_back(total / l);
    }
  }
}

Head Inputs::head(float* out) const {
  const float scale = 1 / std::sqrt(static_cast<float>(d_));
  return {T_, S_, d_, q_.data(), k_.data(), v_.data(), scale, out};
}

double Inputs::worst(const std::vector<float>& out) const {
  double worst = 0;
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(truth_.size()); ++i) {
    const double gap = std::abs(double(out[at(i / d_ * step_ * d_ + i % d_)]) - truth_[at(i)]);
    if (!(gap <= worst)) worst = gap;  // a NaN too
    if (std::isnan(worst)) break;
  }
  return worst;
}

double Lap::best() const { return *std::min_element(seconds.begin(), seconds.end()); }

double Lap::median() const {
  std::vector<double> sorted = seconds;
  std::sort(sorted.begin(), sorted.end());
  return (sorted[(sorted.size() - 1) / 2] + sorted[sorted.size() / 2]) / 2;
}

std::vector<std::string> isas() {
  std::vector<std::string> names;
  const std::vector<std::string> here = available_isas();
  for (const Steps* steps : all_steps)
    if (std::find(here.begin(), here.end(), steps->isa) != here.end()) names.emplace_back(steps->isa);
  return names;
}

int core_step(const std::string& isa) { return steps_of(isa).count; }

Race race(const std::string& isa, const Inputs& inputs, const std::vector<int>& steps, Effort effort) {
  choose_isa(isa);
  const Steps& ladder = steps_of(isa);
  const Head shape = inputs.head(nullptr);
  std::vector<float> out(at(shape.T * shape.d)), room(at(ladder.room(shape)));
  const Head head = inputs.head(out.data());
  const double flops = 4.0 * double(shape.T) * double(shape.S) * double(shape.d);
  Race result;
  std::vector<std::function<void()>> runs;
  for (const int number : steps) {
    const int part = number - ladder.count - 1;
    const Step core{"levelhead::forward", [](const Head& h, const Recipe*, float*) { run_core(h); }, nullptr, 1};
    const Step step = number < ladder.count ? ladder.steps[number] : part < 0 ? core : ladder.parts[part];
    runs.push_back([&head, &room, step] { step.run(head, step.recipe, room.data()); });
    std::fill(out.begin(), out.end(), NAN);  // what is left of it was not computed
    runs.back()();
    const std::string label = part < 0 ? std::to_string(number) : std::to_string(ladder.count - 1) + "abc"[part];
    result.laps.push_back({label, step.name, step.work < 1 ? NAN : inputs.worst(out), flops * step.work, {}});
  }
  for (int round = 0; round < effort.rounds; ++round) {
    result.peak = std::max(result.peak, burn_rate());
    for (std::size_t i = 0; i < runs.size(); ++i) burst(result.laps[i], runs[i], effort.calls);
  }
  return result;
}

}  // namespace levelhead::ladder
