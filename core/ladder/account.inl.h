// The loop nest of kernel.inl.h for one dense head of whole panels, which can stop after any of its parts. It calls the
// core's own functions on the core's own plan. Included by each account_*.cpp, which sets LEVELHEAD_VECTOR_BYTES and
// LEVELHEAD_TILE_ROWS.
#pragma once

#include "account.h"
#include "kernel.inl.h"

namespace levelhead::ladder {
namespace {

using Operand = Numbers<float>;

struct Memory {
  float *pack, *acc, *scores, *spare;
  Strip* strips;
  std::uint8_t* tainted;
  std::int64_t bytes = 0;

  Memory(const Plan& plan, char* memory) {
    const auto carve = [&](auto*& part, std::int64_t n) {
      part = reinterpret_cast<decltype(+part)>(memory ? memory + bytes : nullptr);
      bytes += round_up(n * static_cast<std::int64_t>(sizeof *part), 64);
    };
    carve(pack, plan.blocks * plan.pack_words());
    carve(acc, plan.query_block * plan.padded_columns);
    carve(scores, tile_rows * plan.score_stride);
    carve(spare, plan.D * lanes<float>);
    carve(strips, plan.strips());
    carve(tainted, plan.blocks);
  }
};

std::int64_t account_bytes(const Plan& plan) { return Memory(plan, nullptr).bytes; }

// What a run keeps of a strip besides its sums: else the compiler would remove what it is made from.
struct Kept {
  Vector<float> max = splat(-infinity<float>), total{};
  std::int64_t keys = 0;
};

// One strip against one key block.
void strip_up_to(Stage stage, const Job& job, const Memory& memory, const Strip& strip, std::int64_t block, Row<float>* rows, float* acc,
                 Kept& kept) {
  const Plan& plan = *job.plan;
  const Problem& problem = *job.problem;
  const Span span = visible_span(job, block, strip);
  const std::int64_t first = span.lo, n = span.hi - span.lo, t = strip.t[0];
  const int count = static_cast<int>(strip.rows);
  kept.keys += n;
  if (stage == Stage::spans) return;
  const float* pack = memory.pack + block * plan.pack_words();
  float scale[tile_rows], share[whole_rows<float>], below[tile_rows];
  for (int r = 0; r < tile_rows; ++r) scale[r] = static_cast<float>(problem.scoring.scale[0] * log2_e);
  const ScoreProduct<float> product{reinterpret_cast<const float*>(problem.q.at(0, 0, t)), plan.D, pack, plan.key_words,
                                    plan.score_chunk, scale, memory.scores, plan.score_stride};
  with_tile(count, [&](auto tile) {
    multiply_keys<Operand, tile.value>(problem.scoring, product, 0, n, [](std::int64_t, std::int64_t) {});
  });
  const StripScores<float> scores{memory.scores, plan.score_stride, n, count};
  if (stage == Stage::maxima || stage == Stage::exponentials)
    for (int r = 0; r < count; ++r) kept.max = larger(maxima(scores.s + r * scores.stride, n), kept.max);
  if (stage == Stage::exponentials)  // about a bound: no sum across lanes is waited for
    for (int r = 0; r < count; ++r) kept.total += weigh_row<false>(scores.s + r * scores.stride, n, 32.0f).l[0];
  Noted<float> noted{job, first, false, {}};
  if (stage == Stage::statistics) return softmax_strip<true>(scores, noted, rows, share, [] {});
  if (stage < Stage::softmax) return;
  softmax_strip<false>(scores, noted, rows, share, [] {});
  if (stage < Stage::values) return;
  const bool ends = stage == Stage::output && block + 1 == plan.blocks;
  Target<float> target{block > 0 ? share : nullptr, nullptr, acc, plan.padded_columns, acc, plan.padded_columns};
  if (ends) {
    for (int r = 0; r < tile_rows; ++r) below[r] = r < count ? settled_divisor(job, rows[r], 0) : 1.0f;
    target.below = below;
    target.to = reinterpret_cast<float*>(job.result->out.at(0, 0, t));
    target.step = plan.E;
  }
  Values<float> values{pack + plan.key_block * plan.key_words, panel<float>, plan.value_words()};
  if (values_in_place<float>(problem)) values = {reinterpret_cast<const float*>(problem.v.at(0, 0, first)), plan.E, 1};
  with_tile(count, [&](auto tile) {
    multiply_values<Operand, tile.value>(plan, scores.s, values, 0, n, target, acc);
  });
}

void account_run(const Job& job, Stage stage, char* room) {
  const Plan& plan = *job.plan;
  const Memory memory(plan, room);
  for (std::int64_t block = 0; block < plan.blocks; ++block)
    pack<Operand>(job, 0, 0, block, Packed{memory.pack, memory.tainted}, memory.spare);
  if (stage == Stage::pack) return;
  Kept kept;
  for (std::int64_t t = 0; t < job.problem->T; t += plan.query_block) {
    const std::int64_t end = least(t + plan.query_block, job.problem->T);
    Row<float> rows[long_query_block];
    for (std::int64_t row = t; row < end; row += tile_rows)
      make_strip(job, Piece{0, 0, t, end, 0, plan.blocks}, row, memory.strips[(row - t) / tile_rows]);
    for (std::int64_t block = 0; block < plan.blocks; ++block)
      for (std::int64_t row = t; row < end; row += tile_rows)
        strip_up_to(stage, job, memory, memory.strips[(row - t) / tile_rows], block, rows + row - t,
                    memory.acc + (row - t) * plan.padded_columns, kept);
  }
  store(memory.scores, kept.max + kept.total + static_cast<float>(kept.keys));
}

}  // namespace
}  // namespace levelhead::ladder

#define LEVELHEAD_ACCOUNT(isa)                                                                                  \
  extern "C" const levelhead::ladder::Account levelhead_account_##isa = {                                       \
      #isa, {levelhead::tile_rows, levelhead::panel<float>, 1}, levelhead::ladder::account_bytes, levelhead::ladder::account_run}
