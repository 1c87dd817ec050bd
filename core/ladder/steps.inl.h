// The steps, from a plain loop to nearly what the core does: short, for float, one dense head, one thread.
// No masks, no statistics, no other dtype, no promise about bits: that is the core's (kernel.inl.h).
//
// Steps 1 to 7 are one loop nest, online(), and a Recipe each, made of pieces.inl.h; what a step changes is what
// differs from the line above it in `recipes`. Included by each steps_*.cpp, which sets LEVELHEAD_VECTOR_BYTES and
// LEVELHEAD_TILE_ROWS.
#pragma once

#include "pieces.inl.h"

namespace levelhead::ladder {
namespace {

constexpr int tile_rows = LEVELHEAD_TILE_ROWS;
constexpr Index all_keys = INT64_MAX;

// --- step 0 ---

// The definition. Neither sum may be vectorised: that would change its order.
void plain(const Head& head, const Recipe*, float* s) {
  for (Index t = 0; t < head.T; ++t) {
    float m = -infinity<float>, l = 0;
    for (Index j = 0; j < head.S; ++j) {
      float dot = 0;
      for (Index c = 0; c < head.d; ++c) dot += head.q[t * head.d + c] * head.k[j * head.d + c];
      s[j] = dot * head.scale;
      m = s[j] > m ? s[j] : m;
    }
    for (Index j = 0; j < head.S; ++j) l += s[j] = __builtin_expf(s[j] - m);
    for (Index c = 0; c < head.d; ++c) {
      float total = 0;
      for (Index j = 0; j < head.S; ++j) total += s[j] * head.v[j * head.d + c];
      head.out[t * head.d + c] = total / l;
    }
  }
}

}  // namespace

// --- steps 1 to 7 ---

struct Recipe {
  int rows;                      // queries that go through a block of keys together
  Index query_block, key_block;  // for each block of queries, for each block of keys, for each `rows` queries
  bool packs;                    // K into panels
  double unit;                   // of the scores
  void (*scores)(const float* q, const float* keys, Index n, Index d, float* s, Index step);
  float (*softmax)(float* s, Index n, float& m, float& l);
  void (*values)(const float* weights, Index step, const float* v, Index n, Index d, const float* share, float* acc);
};

namespace {

// The layout of a step's scratch in its room; without a room, the size it needs.
struct Room {
  float *keys, *q, *acc, *m, *l, *s;
  Index step;  // of the rows of s: one vector more than the block, against rows that fall into the same cache sets
  Index floats = 0;

  Room(const Head& head, const Recipe& recipe, float* room) {
    const auto carve = [&](float*& part, Index n) {
      part = room ? room + floats : nullptr;
      floats += n;
    };
    const Index block = recipe.key_block < head.S ? recipe.key_block : head.S;
    step = (block + panel - 1) / panel * panel + width;
    carve(keys, (head.S + panel) * head.d);
    carve(q, recipe.query_block * head.d);
    carve(acc, recipe.query_block * head.d);
    carve(m, recipe.query_block);
    carve(l, recipe.query_block);
    carve(s, recipe.rows * step);
  }
};

// Number c of key j goes to keys[panel of j][c][j within the panel]; what is beyond the last key is zero.
void pack(const Head& head, float* keys) {
  for (Index j = 0; j < (head.S + panel - 1) / panel * panel; ++j)
    for (Index c = 0; c < head.d; ++c)
      keys[j / panel * panel * head.d + c * panel + j % panel] = j < head.S ? head.k[j * head.d + c] : 0;
}

void online(const Head& head, const Recipe* recipe, float* memory) {
  const Room room(head, *recipe, memory);
  const Index d = head.d, rows = recipe->rows;
  const float scale = static_cast<float>(head.scale * recipe->unit);
  if (recipe->packs) pack(head, room.keys);
  const float* keys = recipe->packs ? room.keys : head.k;
  float share[tile_rows];
  for (Index t = 0; t < head.T; t += recipe->query_block) {
    const Index count = recipe->query_block < head.T - t ? recipe->query_block : head.T - t;
    for (Index i = 0; i < recipe->query_block * d; ++i) {
      room.q[i] = i < count * d ? head.q[t * d + i] * scale : 0;
      room.acc[i] = 0;
    }
    for (Index r = 0; r < recipe->query_block; ++r) room.m[r] = -infinity<float>, room.l[r] = 0;
    for (Index j = 0, n; j < head.S; j += n) {
      n = recipe->key_block < head.S - j ? recipe->key_block : head.S - j;
      for (Index r = 0; r < count; r += rows) {
        recipe->scores(room.q + r * d, keys + j * d, n, d, room.s, room.step);
        for (Index i = 0; i < rows; ++i)
          share[i] = recipe->softmax(room.s + i * room.step, n, room.m[r + i], room.l[r + i]);
        recipe->values(room.s, room.step, head.v + j * d, n, d, share, room.acc + r * d);
      }
    }
    for (Index r = 0; r < count; ++r)
      for (Index c = 0; c < d; ++c) head.out[(t + r) * d + c] = room.acc[r * d + c] / room.l[r];
  }
}

// Stand-ins, to see what the others cost alone.
void no_scores(const float*, const float*, Index, Index, float*, Index) {}
float no_softmax(float*, Index, float&, float&) { return 1; }
void no_values(const float*, Index, const float*, Index, Index, const float*, float*) {}

constexpr int R = tile_rows;
constexpr double log2_e = 1.4426950408889634;
constexpr Recipe recipes[] = {
    {1, 1, all_keys, false, 1, dot_scores, libm_softmax, row_values<1>},
    {1, 1, 64, false, 1, dot_scores, libm_softmax, row_values<1>},
    {1, 1, 64, true, 1, tile_scores<1>, libm_softmax, row_values<1>},
    {R, R, 64, true, 1, tile_scores<R>, libm_softmax, row_values<R>},
    {R, R, 64, true, 1, tile_scores<R>, libm_softmax, tile_values<R>},
    {R, R, 64, true, log2_e, tile_scores<R>, vector_softmax, tile_values<R>},
    {R, 96, 512, true, log2_e, tile_scores<R>, vector_softmax, tile_values<R>},
    // The last one in parts.
    {R, 96, 512, true, log2_e, tile_scores<R>, no_softmax, no_values},
    {R, 96, 512, true, log2_e, no_scores, vector_softmax, no_values},
    {R, 96, 512, true, log2_e, no_scores, no_softmax, tile_values<R>},
};
constexpr Step steps[] = {
    {"plain loops", plain, nullptr, 1},
    {"vectors along the rows of K and V", online, recipes, 1},
    {"online softmax, blocks of 64 keys", online, recipes + 1, 1},
    {"K packed, vectors across keys", online, recipes + 2, 1},
    {"register tile for the scores", online, recipes + 3, 1},
    {"register tile for the values", online, recipes + 4, 1},
    {"softmax in vectors, exp as a polynomial", online, recipes + 5, 1},
    {"cache blocks: 96 queries by 512 keys", online, recipes + 6, 1},
};
constexpr Step parts[] = {
    {"scores alone, and packing", online, recipes + 7, 0.5},
    {"softmax alone, and packing", online, recipes + 8, 0},
    {"values alone, and packing", online, recipes + 9, 0.5},
};

Index room_floats(const Head& head) {
  Index most = 0;
  for (const Recipe& recipe : recipes) {
    const Index floats = Room(head, recipe, nullptr).floats;
    most = floats > most ? floats : most;
  }
  return most;
}

}  // namespace
}  // namespace levelhead::ladder

#define LEVELHEAD_LADDER(isa)                                                                     \
  extern "C" const levelhead::ladder::Steps levelhead_ladder_##isa = {                            \
      #isa, levelhead::ladder::steps, sizeof levelhead::ladder::steps / sizeof(levelhead::ladder::Step), \
      levelhead::ladder::parts, levelhead::ladder::room_floats}
