// All tiling decisions, from the problem's shape alone.
//
// The promise "same bits for any number of threads, and for a batch row or a kv group computed alone"
// holds because nothing here reads B, H, G or the number of threads. What does read them (how work is
// dealt out, forward.cpp) never changes a sum's order.
#pragma once

#include <cstdint>

namespace levelhead {

// The register tile of an ISA: `rows` queries by `panel` keys (or value columns), multiplied in words of `per_word` numbers.
struct Tile {
  int rows, panel, per_word;
};

struct Plan {
  Tile tile;
  std::int64_t D, E;
  std::int64_t key_words;       // of one key, or query
  std::int64_t key_block;       // keys whose packed K and V stay in L2 while a query block passes over them
  std::int64_t blocks;          // key blocks
  std::int64_t query_block;     // query rows of one task, a multiple of tile.rows
  std::int64_t split_blocks;    // key blocks of one task when there are few queries; else all
  std::int64_t splits;          // such tasks for the same rows, joined by merge
  bool streams;                 // so few rows that K and V are read in place
  std::int64_t padded_columns;  // E up to whole panels
  std::int64_t score_stride;    // of the rows of a strip of scores
  std::int64_t score_chunk;     // numbers of a key that are summed in one go (in pairs: all)

  [[gnu::always_inline]] std::int64_t strips() const { return query_block / tile.rows; }
  // Words of a column of values, and of one packed key block: keys, then values.
  [[gnu::always_inline]] std::int64_t value_words() const { return key_block / tile.per_word; }
  [[gnu::always_inline]] std::int64_t pack_words() const { return key_block * key_words + value_words() * padded_columns; }
};

[[gnu::always_inline]] inline std::int64_t round_up(std::int64_t n, std::int64_t unit) { return (n + unit - 1) / unit * unit; }

// Packed K and V of a block should take about half of a 512 KiB L2, the smallest in current use:
// at D = E = 64 in float that is 512 keys, at 128 it is 256 (in pairs of bfloat16 both are 512).
constexpr std::int64_t block_bytes = 256 * 1024;
constexpr std::int64_t largest_key_block = 512, smallest_key_block = 64;

// 96 is a multiple of every ISA's row count; each task then reads K and V once per 96 queries, far below
// what memory can deliver. Shorter problems are cut finer so that two cores can share the work.
constexpr std::int64_t long_query_block = 96, short_query_block = 48, short_queries = 384;

// Up to this many queries, reading K and V is the main cost: nothing is packed ahead, and the keys are distributed too,
// in splits of fixed length (so that the bits do not depend on the thread).
constexpr std::int64_t few_queries = 16, split_keys = 1024;

// Up to so many rows of a kv head (queries times heads of the group), packing even a panel of keys costs more than it saves: K
// and V are read in place (kernel_stream.inl.h), in stretches as long as a split. Over many keys, which come from memory, these
// are the rows of a strip where there are registers for a tile of twelve; with fewer the pack is faster from six rows on. Over
// few keys, which stay in a cache, packing pays from three rows on, in pairs from five; but what must be widened is read in place.
constexpr std::int64_t few_keys = 512;
struct Rows {
  std::int64_t group, T, S;
  int per_word;  // numbers of a key in a word of the tiles; 0: they are widened first
};
inline bool streams(Tile tile, const Rows& rows) {
  std::int64_t most = tile.rows >= 12 ? tile.rows : 4;
  if (rows.S <= few_keys && rows.per_word > 0 && most > 2 * rows.per_word) most = 2 * rows.per_word;
  return rows.T <= few_queries && rows.group * rows.T <= most;
}

// n terms in pieces of b have a rounding error of about sqrt(b / n + 1 / b) of that in one go. Halves of a key cost 2 to
// 3 % at d 64 and are needed to be as exact as PyTorch; with few queries memory sets the pace, quarters are free, and with
// few keys the weights' errors do not average out.
inline std::int64_t chunk_of_score(std::int64_t D, std::int64_t T) {
  const std::int64_t pieces = D <= 16 ? 1 : T <= few_queries ? 4 : 2;
  return (D + pieces - 1) / pieces;
}

// A strip against a key block counts as a step for each row, and as so many for each of its two products: about how
// their times compare. Prefetching of the next data is spread over these steps.
constexpr std::int64_t product_steps = 3;

// What a plan depends on. Nothing else, or bits would depend on it.
struct Sizes {
  std::int64_t group;  // query heads that share a kv head
  std::int64_t T, S, D, E;
  std::int64_t real_bytes;  // of a number of the compute type
  bool streamable;          // the scores are dot products
  bool widened;             // k and v have a smaller type
};

inline Plan make_plan(Tile tile, const Sizes& sizes) {
  const auto [group, T, S, D, E, real_bytes, streamable, widened] = sizes;
  Plan plan{};
  plan.tile = tile;
  plan.D = D;
  plan.E = E;
  plan.key_words = (D + tile.per_word - 1) / tile.per_word;
  std::int64_t keys = D + E > 0 ? block_bytes * tile.per_word / ((D + E) * real_bytes) : largest_key_block;
  if (keys > largest_key_block) keys = largest_key_block;
  if (keys < smallest_key_block) keys = smallest_key_block;
  keys = keys / smallest_key_block * smallest_key_block;
  plan.streams = streamable && tile.per_word == 1 && streams(tile, {group, T, S, widened ? 0 : 1});
  if (plan.streams) keys = split_keys;
  plan.key_block = S < keys ? round_up(S > 0 ? S : 1, tile.panel) : keys;
  plan.blocks = (S + plan.key_block - 1) / plan.key_block;
  plan.query_block = T < short_queries ? short_query_block : long_query_block;
  plan.split_blocks = plan.blocks > 0 ? plan.blocks : 1;
  if (T <= few_queries && plan.split_blocks * plan.key_block > split_keys) plan.split_blocks = split_keys / plan.key_block;
  plan.splits = plan.blocks > 0 ? (plan.blocks + plan.split_blocks - 1) / plan.split_blocks : 1;
  plan.padded_columns = round_up(E, tile.panel);
  // One cache line more than the block, so that the rows of a strip do not fall into the same sets.
  plan.score_stride = plan.key_block + 64 / real_bytes;
  plan.score_chunk = chunk_of_score(D, T);
  return plan;
}

// --- gradients ---

// A task of the backward pass owns every `slices`-th key block of a kv head and sums its own part of dQ; the parts are
// folded in order. The stripes make the tasks alike under a causal mask, and their number, from the keys alone, leaves
// work for several cores where there is but one head: hence shorter blocks where there are few keys. Else a block is long,
// since each costs a pass over all queries and a part of dQ, but what is packed and summed of its keys (three rows of D
// and two of E) takes little more than half of a 1 MiB L2, which the queries and the two matrices share.
// 96 queries are whole strips of every ISA.
constexpr std::int64_t gradient_queries = 96, most_slices = 8;
constexpr std::int64_t largest_gradient_block = 256, short_gradient_block = 128, smallest_gradient_block = 64, short_keys = 1024;
constexpr std::int64_t gradient_bytes = 640 * 1024;

inline Plan make_gradient_plan(Tile tile, const Sizes& sizes) {
  const auto [group, T, S, D, E, real_bytes, streamable, widened] = sizes;
  Plan plan = make_plan(tile, sizes);
  std::int64_t keys = S < short_keys ? short_gradient_block : largest_gradient_block;
  while (keys > smallest_gradient_block && keys * (3 * D + 2 * E) * real_bytes > gradient_bytes) keys /= 2;
  plan.key_block = S < keys ? round_up(S > 0 ? S : 1, tile.panel) : keys;
  plan.blocks = (S + plan.key_block - 1) / plan.key_block;
  plan.query_block = gradient_queries;
  plan.splits = plan.blocks > most_slices ? most_slices : plan.blocks;  // none without keys
  plan.split_blocks = 1;
  plan.score_stride = plan.key_block + 64 / real_bytes;
  return plan;
}

}  // namespace levelhead
