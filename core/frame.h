// Common to forward and backward calls: positions of keys, facts about each key block, and a loop over tasks.
// Does not affect the order of sums.
#pragma once

#include <algorithm>
#include <vector>

#include "kernel.h"
#include "threads.h"

namespace levelhead {

class Frame {
 public:
  Frame(const Problem& problem, const Result* result, const Plan& plan, int threads, Interrupt& interrupt)
      : threads_(threads) {
    job.problem = &problem;
    job.result = result;
    job.plan = &plan;
    job.interrupt = &interrupt;
    place_keys();
  }
  Frame(const Frame&) = delete;
  Frame& operator=(const Frame&) = delete;

  Job job;

  template <class Body>
  bool deal(std::int64_t count, const Body& body) const {
    return parallel_for(
        count, threads_, [](void* self, std::int64_t i, int worker) { (*static_cast<const Body*>(self))(i, worker); },
        const_cast<Body*>(&body), *job.interrupt);
  }

  // Segments and scattered positions of each key block, by batch row. False when interrupted.
  bool gather_facts() {
    const Problem& problem = *job.problem;
    const Plan& plan = *job.plan;
    const std::int64_t* segments = problem.scoring.key_segments;
    if (!segments && !job.key_positions) return true;
    facts_.assign(problem.B * plan.blocks, {INT64_MAX, INT64_MIN, INT64_MAX, INT64_MIN, true});
    job.facts = facts_.data();
    return deal(problem.B * plan.blocks, [&](std::int64_t i, int) {
      const std::int64_t b = i / plan.blocks, first = i % plan.blocks * plan.key_block;
      BlockFacts facts = facts_[i];
      for (std::int64_t j = first; j < std::min(first + plan.key_block, problem.S); ++j) {
        const std::int64_t position = job.position(j);
        const std::int64_t segment = segments ? segments[b * problem.S + j] : 0;
        facts = {std::min(facts.min_position, position), std::max(facts.max_position, position),
                 std::min(facts.min_segment, segment), std::max(facts.max_segment, segment),
                 facts.sorted && segment >= facts.max_segment};
      }
      facts_[i] = facts;
    });
  }

 private:
  // Positions that rise evenly are computed; others are stored.
  void place_keys() {
    const Positions& keys = job.problem->scoring.keys;
    if (keys.run_count == 1 && keys.runs[0].stride > 0) {
      const Run& run = keys.runs[0];
      job.key_start = run.start;
      job.key_stride = run.stride;
      const std::int64_t strides = -run.start / run.stride;  // to position 0, if a key is there
      if (strides >= 0 && strides < run.length && run.start + strides * run.stride == 0) job.origin = strides;
      return;
    }
    positions_.reserve(job.problem->S);
    for (std::int64_t i = 0; i < keys.run_count; ++i)
      for (std::int64_t n = 0; n < keys.runs[i].length; ++n)
        positions_.push_back(keys.runs[i].start + n * keys.runs[i].stride);
    job.key_positions = positions_.data();
    for (std::int64_t j = 0; j < job.problem->S; ++j)
      if (positions_[j] == 0) job.origin = j;
  }

  const int threads_;
  std::vector<std::int64_t> positions_;
  std::vector<BlockFacts> facts_;
};

}  // namespace levelhead
