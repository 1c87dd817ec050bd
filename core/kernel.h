// The functions of one ISA: a table per compute type. dispatch.cpp chooses a table once;
// forward.cpp and backward.cpp call it. Compiled once per ISA from kernel.inl.h.
#pragma once

#include "attention.h"
#include "plan.h"

namespace levelhead {

// Key blocks of one kv head, from `first_block` on, in the layout of the register tiles (kernel_pack.inl.h).
// A value that is not finite is zero in there and its block is flagged: such a block takes the path in which it
// reaches only the rows that see it.
struct Packed {
  void* data = nullptr;
  std::uint8_t* tainted = nullptr;  // one per block
  std::int64_t first_block = 0;
  bool on_demand = false;  // room for one block: attend() packs each block when it needs it, or reads it in place
};

// Memory that a worker reads next, prefetched in small steps while it computes. Without it a short head ends before its
// data has arrived, since the CPU's own prefetcher starts anew with each head. All at once, the lines would queue.
struct Ahead {
  struct Rows {
    const char* at;
    std::int64_t stride, count, bytes;
  };
  Rows arrays[4];
  int array = 0;           // the first that is not done
  std::int64_t byte = 0;   // of its first row
  std::int64_t lines = 0;  // cache lines for each step of the computation
};

// States of rows over one split of the keys each, which fold() joins later: (B, H, T, splits).
struct Partials {
  char* rows = nullptr;  // Row<Real>
  char* acc = nullptr;   // E numbers each
};

// Query rows of one kv head: row i belongs to query head g * (H / G) + i / T and query i % T, so that all heads of
// a group can share a pass over the keys. Against key blocks [block0, block1).
struct Piece {
  std::int64_t b, g, row0, row1, block0, block1;
  Ahead* ahead = nullptr;
  const Partials* partials = nullptr;  // where to keep the states; null: write the results
  std::int64_t split = 0;              // which part of the keys the states are of
};

// One query row: of batch row b and query head `head`, query t.
struct QueryRow {
  std::int64_t b, head, t;
};

// One worker: its number and its scratch memory.
struct Worker {
  int number;
  void* scratch;
};

// The finished states of the rows of one head, C-contiguous.
struct HeadStates {
  const void *acc, *sums;
  std::int64_t rows, E;
};

// The parts of dq, one for each slice of a kv head.
struct DqParts {
  const void* data;
  std::int64_t bytes;  // of one part
};

// Structural facts of a key block, to skip it or to know that nothing in it is hidden.
struct BlockFacts {
  std::int64_t min_position, max_position, min_segment, max_segment;
  bool sorted;  // segments never fall from one key to the next
};

// Everything attend() reads that does not depend on the query block.
struct Job {
  const Problem* problem;
  const Result* result;
  const Plan* plan;
  const std::int64_t* key_positions = nullptr;  // (S,), or null: they rise evenly
  std::int64_t key_start = 0, key_stride = 1;   // the position of key 0 then, and from key to key
  std::int64_t origin = -1;                     // the key at position 0 (the last, if several are), or none
  const BlockFacts* facts = nullptr;            // (B, blocks), or null: not needed
  Interrupt* interrupt = nullptr;

  [[gnu::always_inline]] std::int64_t position(std::int64_t key) const {
    return key_positions ? key_positions[key] : key_start + key * key_stride;
  }
};

// Everything the backward pass reads beside the job.
struct Backward {
  const Gradients* given;
  void *lse, *delta;         // (B, H, T, 2) and (B, H, T) of the compute type, made by GradientTable::queries
  const void* sums;          // (B, H, T, row_sums) of the compute type, for far rows; null: there are none
  double* dscale;            // (B, H, T), or null: not wanted
  std::int64_t value_chunk;  // Plan::score_chunk for dout . v
  bool parts;                // whether dq is summed at all
  std::int64_t rows;         // query rows of a kv head; the row after them is where a part sums dadditive
};

struct KernelTable {
  Tile tile;
  std::int64_t (*scratch_bytes)(const Plan&);  // scratch memory of each worker
  std::int64_t row_bytes;                      // sizeof(Row)
  void (*pack)(const Job&, std::int64_t b, std::int64_t g, std::int64_t block, const Packed&, void* scratch);
  // At most plan.query_block rows. Writes the results, or the states when the piece has partials. Stops early when
  // interrupted.
  void (*attend)(const Job&, const Packed&, const Piece&, const Worker&);
  // Joins the splits of a query row in order, and writes its results.
  void (*fold)(const Job&, const Partials&, const QueryRow&, void* scratch);
  // acc / denominator for the rows of one head, into that head of out.
  void (*finish)(const HeadStates&, const double* sink, const MutableTensor& out, std::int64_t b, std::int64_t head);
  void (*exponential)(const void* x, void* y, std::int64_t n);
};

// The backward pass (kernel_backward.inl.h), for each kv head: its query rows a block at a time, then its slices of keys, then
// the folding of all rows, a block at a time.
struct GradientTable {
  Tile tile;
  std::int64_t (*scratch_bytes)(const Plan&);
  std::int64_t (*query_bytes)(const Plan&);  // of a block of query rows, packed
  // `rows` is a block of query rows of a kv head.
  void (*queries)(const Job&, const Backward&, const Piece& rows, void* packed, void* scratch);
  // `rows` are all of the kv head, and `queries` has all their blocks. `part` has a row of whole panels for each of them,
  // and tile.rows more.
  void (*slice)(const Job&, const Backward&, const Piece& rows, std::int64_t slice, const void* queries, void* part,
                const Worker&);
  void (*fold)(const Job&, const Backward&, const Piece& rows, const void* packed, const DqParts&, void* scratch);
};

// For operands of the compute type; every isa_*.cpp has these, unless it only adds to another.
struct NumberTables {
  KernelTable f32, f64;
  GradientTable gradients_f32, gradients_f64;
  std::int64_t (*burn)(std::int64_t rounds);  // machine.h
  float (*sweep)(const float* x, std::int64_t n);
};

struct Kernel {
  const char* name;
  const NumberTables* numbers;
  const KernelTable* pairs;  // for operands in bfloat16, sums in float; null where no instruction does that
};

const Kernel& kernel();  // the one in use

// Interrupt::requested, for code that may not include the standard library's inline functions.
bool interrupted(Interrupt& interrupt, int worker);

}  // namespace levelhead
