// One problem, all steps that compute it, and how they are timed: in turns, so that a machine that becomes slower affects
// all of them. Does not print or write files.
#pragma once

#include <string>
#include <vector>

#include "ladder.h"

namespace levelhead::ladder {

// Random queries, keys and values (standard normal, fixed seed), and some rows of the output in double precision.
class Inputs {
 public:
  Inputs(std::int64_t T, std::int64_t S, std::int64_t d);
  Head head(float* out) const;
  double worst(const std::vector<float>& out) const;  // largest distance from the truth

 private:
  std::int64_t T_, S_, d_, step_;  // every step_-th row of the truth is known
  std::vector<float> q_, k_, v_;
  std::vector<double> truth_;
};

struct Lap {
  std::string step;  // its number, or "7a" for the first part of step 7
  std::string name;
  double error;                 // largest; none for a part
  double flops;                 // of a call
  std::vector<double> seconds;  // of each call; empty when it was only checked
  double best() const;
  double median() const;
};

struct Race {
  double peak = 0;  // flops per second of register-only FMAs, the best seen among the bursts
  std::vector<Lap> laps;
};

// How often: `rounds` times every step gets a burst of up to `calls` calls after two warm-ups, fewer (and one
// warm-up) when a call is long. No rounds: every step runs once, for the error.
struct Effort {
  int rounds = 5, calls = 10;
};

std::vector<std::string> isas();  // that have steps and run here, plainest first

// The steps of an ISA are 0 to core_step(), which is levelhead::forward itself; the parts of the last step before it
// follow.
int core_step(const std::string& isa);
Race race(const std::string& isa, const Inputs& inputs, const std::vector<int>& steps, Effort effort);

}  // namespace levelhead::ladder
