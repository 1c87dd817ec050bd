// What one ISA offers: a table of functions per compute type. dispatch.cpp chooses a table once;
// forward.cpp drives it. Compiled once per ISA from kernel.inl.h.
#pragma once

#include "attention.h"
#include "plan.h"

namespace levelhead {

// Keys and values of one kv head, in the layout of the register tiles (kernel_pack.inl.h):
// keys in panels of `panel` keys, each D x panel; values in panels of `panel` columns, each S x panel.
// Values that are not finite are zeroed there and their block is flagged: such a block takes the
// path in which they reach only the rows that see them.
struct Packed {
  void* keys = nullptr;
  void* values = nullptr;
  std::uint8_t* tainted = nullptr;  // one per key block
};

// Structural facts of a key block, to skip it or to know that nothing in it is hidden.
struct BlockFacts {
  std::int64_t min_position, max_position, min_segment, max_segment;
};

// Everything attend() reads that does not depend on the query block.
struct Job {
  const Problem* problem;
  const Result* result;
  const Plan* plan;
  const std::int64_t* key_positions = nullptr;  // (S,), or null: start + index
  std::int64_t key_start = 0;                   // position of key 0 when they are consecutive
  const BlockFacts* facts = nullptr;            // (B, blocks), or null: nothing to know
  Interrupt* interrupt = nullptr;
};

struct KernelTable {
  Tile tile;
  std::int64_t (*scratch_bytes)(const Plan&);  // what each worker brings along
  void (*pack)(const Job&, std::int64_t b, std::int64_t g, std::int64_t block, const Packed&, void* scratch);
  // Rows [t0, t1) of one query head, at most plan.query_block of them. Stops early when interrupted.
  void (*attend)(const Job&, const Packed&, std::int64_t b, std::int64_t head, std::int64_t t0,
                 std::int64_t t1, int worker, void* scratch);
  // acc / denominator for n rows of one head, into rows [t, t + n) of out.
  void (*finish)(const void* acc, std::int64_t acc_stride, const void* sums, std::int64_t sums_stride,
                 std::int64_t n, std::int64_t E, const double* sink, const MutableTensor& out,
                 std::int64_t b, std::int64_t head, std::int64_t t);
  void (*exponential)(const void* x, void* y, std::int64_t n);
};

struct Kernel {
  const char* name;
  KernelTable f32, f64;
  std::int64_t (*burn)(std::int64_t rounds);  // machine.h
  float (*sweep)(const float* x, std::int64_t n);
};

const Kernel& kernel();  // the one in use

// Interrupt::requested, for code that may not include the standard library's inline functions.
bool interrupted(Interrupt& interrupt, int worker);

}  // namespace levelhead
