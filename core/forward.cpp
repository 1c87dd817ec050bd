// Distributes the work of one call over threads. Decides which thread computes what and when, never the order of a row's
// sums: that is fixed by plan.h, which does not depend on B, H or the number of threads.
#include <algorithm>
#include <optional>
#include <vector>

#include "attention.h"
#include "frame.h"
#include "kernel.h"
#include "state.h"
#include "threads.h"
#include "workspace.h"

namespace levelhead {
namespace {

// Three ways to distribute the work, none of which changes a bit of a row:
//   few queries      each task packs a few keys for itself and drops them (reading K and V once is the main cost)
//   many short heads each kv head is one task: no barrier, and the pack stays in that core's cache
//   the rest         all keys and values are packed first, then shared by all threads
constexpr double short_head_flops = 5e7;  // about half a millisecond of one core
constexpr double even_head_flops = 5e8;   // the same where the heads divide evenly: no worker waits for the last
constexpr std::int64_t heads_per_thread = 4;
// Short tasks are grouped in runs: enough runs that workers end at about the same time, and each short enough to check for
// an interrupt between two (the check reads a clock, which is too slow for every task of half a microsecond).
constexpr std::int64_t runs_per_thread = 16, longest_run = 64;

// A head is prefetched while the one before it is computed, up to this size of all four arrays: both must fit into an L2.
constexpr std::int64_t fetched_bytes = std::int64_t(256) << 10;

// Shared packs are made for a few kv heads at a time once they would take more than this.
constexpr std::int64_t shared_pack_bytes = std::int64_t(256) << 20;

std::int64_t bytes_of(DType dtype) {
  return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : dtype == DType::boolean ? 1 : 2;
}

class Call {
 public:
  Call(const Problem& problem, const Result& result, const KernelTable& kernel, std::int64_t real_bytes, int threads,
       Interrupt& interrupt)
      : problem_(problem),
        kernel_(kernel),
        plan_(make_plan(kernel.tile, {.group = problem.G > 0 ? problem.H / problem.G : 0,
                                      .T = problem.T,
                                      .S = problem.S,
                                      .D = problem.D,
                                      .E = problem.v ? problem.E : 0,
                                      .real_bytes = real_bytes,
                                      .streamable = !problem.scoring.additive,
                                      .widened = bytes_of(problem.k.dtype) < real_bytes})),
        interrupt_(interrupt),
        group_(problem.G > 0 ? problem.H / problem.G : 0),
        kv_heads_(problem.B * problem.G),
        threads_(workers(threads)),
        block_bytes_(plan_.pack_words() * real_bytes),
        scratch_bytes_(kernel.scratch_bytes(plan_)),
        partial_acc_bytes_(plan_.E * real_bytes),
        frame_(problem, &result, plan_, threads_, interrupt),
        job_(frame_.job) {}

  bool run() {
    if (kv_heads_ == 0 || problem_.T == 0) return true;
    if (!frame_.gather_facts()) return false;
    if (problem_.T <= few_queries) return run_few_queries();
    const double flops = 2.0 * double(group_) * double(problem_.T) * double(problem_.S) * double(problem_.D + problem_.E);
    const double whole_flops = kv_heads_ % threads_ == 0 ? even_head_flops : short_head_flops;
    if (threads_ == 1 || (flops < whole_flops && kv_heads_ >= heads_per_thread * threads_)) return run_whole_heads();
    const std::int64_t bytes = std::max<std::int64_t>(plan_.blocks * block_bytes_, 1);
    const std::int64_t together = std::max<std::int64_t>(1, shared_pack_bytes / bytes);
    for (std::int64_t first = 0; first < kv_heads_; first += together)
      if (!run_shared(first, std::min(kv_heads_ - first, together))) return false;
    return true;
  }

 private:
  // Query rows of a kv head come in blocks of whole heads' rows, one after another.
  std::int64_t row_blocks() const { return (group_ * problem_.T + plan_.query_block - 1) / plan_.query_block; }

  // No more than there are tasks.
  int workers(int threads) const {
    const std::int64_t tasks = std::max<std::int64_t>(1, kv_heads_ * row_blocks() * plan_.splits);
    return static_cast<int>(std::clamp<std::int64_t>(threads, 1, std::min<std::int64_t>(tasks, max_threads)));
  }

  // Memory for `packs` times `blocks` packed key blocks, for each worker, and for `partials` partial states.
  void reserve(std::int64_t packs, std::int64_t blocks, std::int64_t partials) {
    const std::int64_t flags = packs * blocks;
    workspace_.emplace(round_up(packs * blocks * block_bytes_, 64) + round_up(flags, 64) +
                       round_up(scratch_bytes_ * threads_, 64) + round_up(partials * kernel_.row_bytes, 64) +
                       round_up(partials * partial_acc_bytes_, 64));
    char* data = workspace_->take(packs * blocks * block_bytes_);
    auto* tainted = reinterpret_cast<std::uint8_t*>(workspace_->take(flags));
    packs_.clear();
    for (std::int64_t i = 0; i < packs; ++i) packs_.push_back({data + i * blocks * block_bytes_, tainted + i * blocks});
    scratch_ = workspace_->take(scratch_bytes_ * threads_);
    partials_ = {workspace_->take(partials * kernel_.row_bytes), workspace_->take(partials * partial_acc_bytes_)};
  }

  char* scratch(int worker) const { return scratch_ + worker * scratch_bytes_; }
  Worker with_scratch(int worker) const { return {worker, scratch(worker)}; }

  Piece rows_of(std::int64_t kv_head, std::int64_t row_block) const {
    const std::int64_t row0 = row_block * plan_.query_block;
    return {kv_head / problem_.G, kv_head % problem_.G, row0, std::min(row0 + plan_.query_block, group_ * problem_.T), 0,
            plan_.blocks};
  }
  void attend(const Packed& packed, std::int64_t kv_head, std::int64_t row_block, int worker, Ahead* ahead = nullptr) {
    Piece piece = rows_of(kv_head, row_block);
    piece.ahead = ahead;
    kernel_.attend(job_, packed, piece, with_scratch(worker));
  }
  // Nothing where query_lengths leaves no query: attend() reads no pack then.
  void pack(const Packed& packed, std::int64_t kv_head, std::int64_t block, int worker) {
    const std::int64_t b = kv_head / problem_.G;
    if (problem_.scoring.has_queries(b)) kernel_.pack(job_, b, kv_head % problem_.G, block, packed, scratch(worker));
  }

  // The memory that a kv head reads and writes, for prefetching; none for a long one.
  Ahead ahead_of(std::int64_t kv_head) const {
    const std::int64_t b = kv_head / problem_.G, g = kv_head % problem_.G, rows = group_ * problem_.T;
    const auto array = [&](const auto& x, std::int64_t head, std::int64_t count, std::int64_t width) -> Ahead::Rows {
      const std::int64_t bytes = width * bytes_of(x.dtype);
      if (!x) return {nullptr, 0, 0, 0};
      if (x.row_stride == bytes) return {x.at(b, head, 0), 0, 1, count * bytes};
      return {x.at(b, head, 0), x.row_stride, count, bytes};
    };
    const auto even = [&](const auto& x) { return x.head_stride == problem_.T * x.row_stride ? rows : problem_.T; };
    const MutableTensor& out = job_.result->out;
    Ahead ahead{{array(problem_.k, g, problem_.S, problem_.D), array(problem_.v, g, problem_.S, problem_.E),
                 array(problem_.q, g * group_, even(problem_.q), problem_.D),
                 array(out, g * group_, even(out), problem_.E)}};
    std::int64_t bytes = 0;
    for (const Ahead::Rows& part : ahead.arrays) bytes += part.count * part.bytes;
    const std::int64_t strips = (rows + plan_.tile.rows - 1) / plan_.tile.rows;
    const std::int64_t steps = std::max<std::int64_t>(1, plan_.blocks * (rows + 2 * product_steps * strips));
    if (bytes <= fetched_bytes) ahead.lines = (bytes / 64 + steps - 1) / steps;
    return ahead;
  }

  // Frame::deal where tasks may be as small as a microsecond: neighbours form runs. A run takes one access to the counter
  // instead of many, and its worker can prefetch the next task: `more` says whether the run has one.
  template <class Body>
  bool deal_runs(std::int64_t count, const Body& body) {
    const std::int64_t runs = std::min(count, std::max(runs_per_thread * threads_, count / longest_run));
    return frame_.deal(runs, [&](std::int64_t run, int worker) {
      const std::int64_t last = count * (run + 1) / runs;
      for (std::int64_t i = count * run / runs; i < last; ++i) body(i, i + 1 < last, worker);
    });
  }

  bool run_few_queries() {
    const bool split = plan_.splits > 1;
    reserve(threads_, 1, split ? problem_.B * problem_.H * problem_.T * plan_.splits : 0);
    for (Packed& pack : packs_) pack.on_demand = true;
    const std::int64_t blocks = row_blocks();
    const bool done = deal_runs(kv_heads_ * blocks * plan_.splits, [&](std::int64_t i, bool more, int worker) {
      Piece piece = rows_of(i / plan_.splits / blocks, i / plan_.splits % blocks);
      Ahead ahead;
      if (more && blocks * plan_.splits == 1) {
        ahead = ahead_of(i + 1);
        piece.ahead = &ahead;
      }
      piece.block0 = i % plan_.splits * plan_.split_blocks;
      piece.block1 = std::min(piece.block0 + plan_.split_blocks, plan_.blocks);
      piece.partials = split ? &partials_ : nullptr;
      piece.split = i % plan_.splits;
      kernel_.attend(job_, packs_[worker], piece, with_scratch(worker));
    });
    return done && (!split || frame_.deal(problem_.B * problem_.H * problem_.T, [&](std::int64_t i, int worker) {
             const std::int64_t head = i / problem_.T;
             kernel_.fold(job_, partials_, {head / problem_.H, head % problem_.H, i % problem_.T}, scratch(worker));
           }));
  }

  bool run_whole_heads() {
    reserve(threads_, plan_.blocks, 0);
    return deal_runs(kv_heads_, [&](std::int64_t kv_head, bool more, int worker) {
      Ahead ahead = more ? ahead_of(kv_head + 1) : Ahead{};
      for (std::int64_t block = 0; block < plan_.blocks && (block == 0 || !interrupt_.requested(worker)); ++block)
        pack(packs_[worker], kv_head, block, worker);
      for (std::int64_t i = 0; i < row_blocks() && (i == 0 || !interrupt_.requested(worker)); ++i)
        attend(packs_[worker], kv_head, i, worker, &ahead);
    });
  }

  // kv heads [first, first + count). Later query rows first: under a causal mask they see the most.
  bool run_shared(std::int64_t first, std::int64_t count) {
    reserve(count, plan_.blocks, 0);
    const bool packed = frame_.deal(count * plan_.blocks, [&](std::int64_t i, int worker) {
      pack(packs_[i / plan_.blocks], first + i / plan_.blocks, i % plan_.blocks, worker);
    });
    const std::int64_t blocks = row_blocks();
    return packed && frame_.deal(count * blocks, [&](std::int64_t i, int worker) {
             attend(packs_[i / blocks], first + i / blocks, blocks - 1 - i % blocks, worker);
           });
  }

  const Problem& problem_;
  const KernelTable& kernel_;
  const Plan plan_;
  Interrupt& interrupt_;
  const std::int64_t group_, kv_heads_;  // query heads per kv head; kv heads of all batch rows
  const int threads_;
  const std::int64_t block_bytes_, scratch_bytes_, partial_acc_bytes_;
  Frame frame_;
  const Job& job_;
  std::optional<Workspace> workspace_;
  std::vector<Packed> packs_;
  Partials partials_;
  char* scratch_ = nullptr;
};

const KernelTable& table_of(DType dtype) { return dtype == DType::f64 ? kernel().numbers->f64 : kernel().numbers->f32; }

// Whether both products use bfloat16 directly. Not for unit vectors, which are float; not where memory is the main cost.
bool in_pairs(const Problem& problem) {
  const auto fits = [](const Tensor& x) { return x.dtype == DType::bf16; };
  return kernel().pairs && problem.G > 0 && fits(problem.q) && fits(problem.k) && (!problem.v || fits(problem.v)) &&
         !problem.scoring.cosine && !problem.scoring.additive &&
         !streams(kernel().numbers->f32.tile, {problem.H / problem.G, problem.T, problem.S, 2});
}

}  // namespace

bool interrupted(Interrupt& interrupt, int worker) { return interrupt.requested(worker); }

bool forward(const Problem& problem, const Result& result, int threads, Interrupt& interrupt) {
  const bool wide = problem.q.dtype == DType::f64;
  const KernelTable& table = in_pairs(problem) ? *kernel().pairs : table_of(problem.q.dtype);
  return Call(problem, result, table, wide ? sizeof(double) : sizeof(float), threads, interrupt).run();
}

void finish(const States& states, const double* sinks, const MutableTensor& out) {
  const auto [B, H, T, E, compute, acc, sums] = states;
  const KernelTable& table = table_of(compute);
  const std::int64_t bytes = compute == DType::f64 ? sizeof(double) : sizeof(float);
  for (std::int64_t head = 0; head < B * H; ++head)
    table.finish({static_cast<const char*>(acc) + head * T * E * bytes,
                  static_cast<const char*>(sums) + head * T * row_sums * bytes, T, E},
                 sinks ? sinks + head % H : nullptr, out, head / H, head % H);
}

void exponential(DType compute, const void* x, void* y, std::int64_t n) {
  table_of(compute).exponential(x, y, n);
}

}  // namespace levelhead
