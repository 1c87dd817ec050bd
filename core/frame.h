// What every call has, forward or backward: where its keys sit, what is known of each key block, and a loop over tasks.
// Decides nothing about the order of sums.
#pragma once

#include <algorithm>
#include <vector>

#include "kernel.h"
#include "threads.h"

namespace levelhead {

class Frame {
 public:
  Frame(const Problem& problem, const Result* result, const Plan& plan, int threads, Interrupt& interrupt)
      : job{&problem, result, &plan, nullptr, 0, nullptr, &interrupt}, threads_(threads) {
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
        const std::int64_t position = job.key_positions ? job.key_positions[j] : job.key_start + j;
        const std::int64_t segment = segments ? segments[b * problem.S + j] : 0;
        facts = {std::min(facts.min_position, position), std::max(facts.max_position, position),
                 std::min(facts.min_segment, segment), std::max(facts.max_segment, segment),
                 facts.sorted && segment >= facts.max_segment};
      }
      facts_[i] = facts;
    });
  }

 private:
  // Keys with consecutive positions are the rule; others get their positions written out.
  void place_keys() {
    const Positions& keys = job.problem->scoring.keys;
    if (keys.run_count == 1 && keys.runs[0].stride == 1) {
      job.key_start = keys.runs[0].start;
      return;
    }
    positions_.reserve(job.problem->S);
    for (std::int64_t i = 0; i < keys.run_count; ++i)
      for (std::int64_t n = 0; n < keys.runs[i].length; ++n)
        positions_.push_back(keys.runs[i].start + n * keys.runs[i].stride);
    job.key_positions = positions_.data();
  }

  const int threads_;
  std::vector<std::int64_t> positions_;
  std::vector<BlockFacts> facts_;
};

}  // namespace levelhead
