// Deals the work of one call out to threads. Decides who computes what and when, never in which order a row's
// sums are taken: that is plan.h's, which does not know B, H or the number of threads.
#include <algorithm>
#include <vector>

#include "attention.h"
#include "kernel.h"
#include "state.h"
#include "threads.h"
#include "workspace.h"

namespace levelhead {
namespace {

// Keys and values of all kv heads are packed first and then shared by everybody (long sequences), or each kv
// head is one task that packs for itself (many short ones: no barrier, and the pack stays in that core's cache).
constexpr double short_head_flops = 5e7;  // about half a millisecond of one core
constexpr std::int64_t heads_per_thread = 4;

// Shared packs are made for a few kv heads at a time once they would take more than this.
constexpr std::int64_t shared_pack_bytes = std::int64_t(256) << 20;

class Call {
 public:
  Call(const Problem& problem, const Result& result, const KernelTable& kernel, std::int64_t real_bytes, int threads,
       Interrupt& interrupt)
      : problem_(problem),
        kernel_(kernel),
        plan_(make_plan(kernel.tile, problem.T, problem.S, problem.D, problem.v ? problem.E : 0, real_bytes)),
        interrupt_(interrupt),
        threads_(workers(threads)),
        key_bytes_(plan_.key_elements() * real_bytes),
        value_bytes_(plan_.value_elements() * real_bytes),
        scratch_bytes_(kernel.scratch_bytes(plan_)) {
    job_ = {&problem, &result, &plan_, nullptr, 0, nullptr, &interrupt};
    place_keys();
    gather_facts();
  }

  bool run() {
    if (problem_.B == 0 || problem_.H == 0 || problem_.T == 0) return true;
    const double flops = 2.0 * double(problem_.H / problem_.G) * double(problem_.T) * double(problem_.S) *
                         double(problem_.D + problem_.E);
    const std::int64_t heads = problem_.B * problem_.G;
    if (threads_ == 1 || (flops < short_head_flops && heads >= heads_per_thread * threads_)) return run_whole_heads(heads);
    const std::int64_t bytes = std::max<std::int64_t>(key_bytes_ + value_bytes_, 1);
    const std::int64_t together = std::max<std::int64_t>(heads_per_thread * threads_, shared_pack_bytes / bytes);
    for (std::int64_t first = 0; first < heads; first += together)
      if (!run_shared(first, std::min(heads - first, together))) return false;
    return true;
  }

 private:
  // Keys with consecutive positions are the rule; others get their positions written out.
  void place_keys() {
    const Positions& keys = problem_.scoring.keys;
    if (keys.run_count == 1 && keys.runs[0].stride == 1) {
      job_.key_start = keys.runs[0].start;
      return;
    }
    positions_.reserve(problem_.S);
    for (std::int64_t i = 0; i < keys.run_count; ++i)
      for (std::int64_t n = 0; n < keys.runs[i].length; ++n)
        positions_.push_back(keys.runs[i].start + n * keys.runs[i].stride);
    job_.key_positions = positions_.data();
  }

  void gather_facts() {
    const std::int64_t* segments = problem_.scoring.key_segments;
    if (!segments && !job_.key_positions) return;
    facts_.reserve(problem_.B * plan_.blocks);
    for (std::int64_t b = 0; b < problem_.B; ++b)
      for (std::int64_t j = 0; j < problem_.S; ++j) {
        if (j % plan_.key_block == 0) facts_.push_back({INT64_MAX, INT64_MIN, INT64_MAX, INT64_MIN});
        const std::int64_t position = job_.key_positions ? job_.key_positions[j] : job_.key_start + j;
        const std::int64_t segment = segments ? segments[b * problem_.S + j] : 0;
        BlockFacts& facts = facts_.back();
        facts = {std::min(facts.min_position, position), std::max(facts.max_position, position),
                 std::min(facts.min_segment, segment), std::max(facts.max_segment, segment)};
      }
    job_.facts = facts_.data();
  }

  // No more than there are tasks to deal.
  int workers(int threads) const {
    const std::int64_t tasks = std::max<std::int64_t>(1, problem_.B * problem_.H * query_blocks());
    return static_cast<int>(std::clamp<std::int64_t>(threads, 1, std::min<std::int64_t>(tasks, max_threads)));
  }

  std::int64_t query_blocks() const { return (problem_.T + plan_.query_block - 1) / plan_.query_block; }

  // Memory for `packs` kv heads, packed, and for each worker.
  void reserve(Workspace& workspace, std::int64_t packs) {
    for (std::int64_t i = 0; i < packs; ++i)
      packs_.push_back({workspace.take(key_bytes_), workspace.take(value_bytes_),
                        reinterpret_cast<std::uint8_t*>(workspace.take(plan_.blocks))});
    scratch_ = workspace.take(scratch_bytes_ * threads_);
  }
  std::size_t workspace_bytes(std::int64_t packs) const {
    return packs * (round_up(key_bytes_, 64) + round_up(value_bytes_, 64) + round_up(plan_.blocks, 64)) +
           scratch_bytes_ * threads_;
  }

  void attend(const Packed& packed, std::int64_t head_index, std::int64_t query_block, int worker) {
    const std::int64_t t0 = query_block * plan_.query_block, t1 = std::min(t0 + plan_.query_block, problem_.T);
    kernel_.attend(job_, packed, head_index / problem_.H, head_index % problem_.H, t0, t1, worker,
                   scratch_ + worker * scratch_bytes_);
  }
  void pack(const Packed& packed, std::int64_t kv_head, std::int64_t block, int worker) {
    kernel_.pack(job_, kv_head / problem_.G, kv_head % problem_.G, block, packed, scratch_ + worker * scratch_bytes_);
  }

  template <class Body>
  bool deal(std::int64_t count, const Body& body) {
    return parallel_for(
        count, threads_, [](void* self, std::int64_t i, int worker) { (*static_cast<const Body*>(self))(i, worker); },
        const_cast<Body*>(&body), interrupt_);
  }

  bool run_whole_heads(std::int64_t heads) {
    const int workers = static_cast<int>(std::min<std::int64_t>(threads_, heads));
    Workspace workspace(workspace_bytes(workers));
    packs_.clear();
    reserve(workspace, workers);
    const std::int64_t group = problem_.H / problem_.G;
    return deal(heads, [&](std::int64_t kv_head, int worker) {
      for (std::int64_t block = 0; block < plan_.blocks; ++block) pack(packs_[worker], kv_head, block, worker);
      for (std::int64_t h = 0; h < group; ++h)
        for (std::int64_t i = 0; i < query_blocks(); ++i) {
          if (interrupt_.requested(worker)) return;
          attend(packs_[worker], kv_head * group + h, i, worker);
        }
    });
  }

  // kv heads [first, first + count). Later query blocks first: under a causal mask they are the longest.
  bool run_shared(std::int64_t first, std::int64_t count) {
    Workspace workspace(workspace_bytes(count));
    packs_.clear();
    reserve(workspace, count);
    const bool packed = deal(count * plan_.blocks, [&](std::int64_t i, int worker) {
      pack(packs_[i / plan_.blocks], first + i / plan_.blocks, i % plan_.blocks, worker);
    });
    if (!packed) return false;
    const std::int64_t group = problem_.H / problem_.G, blocks = query_blocks();
    return deal(count * group * blocks, [&](std::int64_t i, int worker) {
      const std::int64_t head = i / blocks;
      attend(packs_[head / group], first * group + head, blocks - 1 - i % blocks, worker);
    });
  }

  const Problem& problem_;
  const KernelTable& kernel_;
  const Plan plan_;
  Interrupt& interrupt_;
  const int threads_;
  const std::int64_t key_bytes_, value_bytes_, scratch_bytes_;
  Job job_;
  std::vector<std::int64_t> positions_;
  std::vector<BlockFacts> facts_;
  std::vector<Packed> packs_;
  char* scratch_ = nullptr;
};

}  // namespace

bool interrupted(Interrupt& interrupt, int worker) { return interrupt.requested(worker); }

bool forward(const Problem& problem, const Result& result, int threads, Interrupt& interrupt) {
  const bool wide = problem.q.dtype == DType::f64;
  return Call(problem, result, wide ? kernel().f64 : kernel().f32, wide ? sizeof(double) : sizeof(float), threads, interrupt)
      .run();
}

void finish(std::int64_t B, std::int64_t H, std::int64_t T, std::int64_t E, DType compute, const void* acc,
            const void* sums, const double* sinks, const MutableTensor& out) {
  const KernelTable& table = compute == DType::f64 ? kernel().f64 : kernel().f32;
  const std::int64_t bytes = compute == DType::f64 ? sizeof(double) : sizeof(float);
  for (std::int64_t head = 0; head < B * H; ++head)
    table.finish(static_cast<const char*>(acc) + head * T * E * bytes, E,
                 static_cast<const char*>(sums) + head * T * row_sums * bytes, row_sums, T, E,
                 sinks ? sinks + head % H : nullptr, out, head / H, head % H, 0);
}

void exponential(DType compute, const void* x, void* y, std::int64_t n) {
  (compute == DType::f64 ? kernel().f64 : kernel().f32).exponential(x, y, n);
}

}  // namespace levelhead
