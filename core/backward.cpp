// Distributes the work of one backward pass over threads: query rows, then slices of keys, then the folding of their parts
// of dq. Which thread computes what never changes the order of a sum.
#include <cmath>
#include <optional>

#include "attention.h"
#include "frame.h"
#include "kernel.h"
#include "state.h"
#include "workspace.h"

namespace levelhead {
namespace {

// Packed queries and parts of dq are kept for as many kv heads at a time as fit into this, and for one at least.
constexpr std::int64_t most_bytes = std::int64_t(64) << 20;

class BackwardCall {
 public:
  BackwardCall(const Problem& problem, const Gradients& gradients, const GradientTable& kernel, std::int64_t real_bytes,
               int threads, Interrupt& interrupt)
      : problem_(problem),
        gradients_(gradients),
        kernel_(kernel),
        plan_(make_gradient_plan(kernel.tile, {.group = 1,
                                               .T = problem.T,
                                               .S = problem.S,
                                               .D = problem.D,
                                               .E = problem.E,
                                               .real_bytes = real_bytes,
                                               .streamable = false,
                                               .widened = false})),
        real_bytes_(real_bytes),
        rows_(problem.G > 0 ? problem.H / problem.G * problem.T : 0),
        threads_(std::clamp(threads, 1, max_threads)),
        frame_(problem, nullptr, plan_, threads_, interrupt) {}

  bool run() {
    if (gradients_.dadditive) std::fill_n(gradients_.dadditive, problem_.D, 0.0);
    if (problem_.B * problem_.G == 0) return true;
    if (has_far_rows() && !sum_again()) return false;
    reserve();
    if (!frame_.gather_facts()) return false;
    if (!run_alone(alone_)) return false;
    for (std::int64_t first = alone_; first < problem_.B * problem_.G; first += together_)
      if (!run_together(first, std::min(together_, problem_.B * problem_.G - first))) return false;
    sum_over_rows();
    return true;
  }

 private:
  bool has_far_rows() const {
    bool any = false;
    for (std::int64_t i = 0; !any && i < problem_.B * problem_.H * problem_.T; ++i)
      any = real_bytes_ == sizeof(double) ? is_far(static_cast<const double*>(gradients_.logsumexp)[i])
                                          : is_far(static_cast<const float*>(gradients_.logsumexp)[i]);
    return any;
  }

  // m and l of all rows: one more pass over the keys. Rare: logits of a healthy model are below a hundred.
  bool sum_again() {
    sums_ = gradients_.sums;
    if (sums_) return true;
    const std::int64_t rows = problem_.B * problem_.H * problem_.T;
    again_.emplace(round_up(rows * row_sums * real_bytes_, 64) + round_up(rows * row_counts * std::int64_t(sizeof(std::int64_t)), 64));
    Problem problem = problem_;
    problem.v = {};
    Result result;
    result.sums = again_->take(rows * row_sums * real_bytes_);
    result.counts = reinterpret_cast<std::int64_t*>(again_->take(rows * row_counts * std::int64_t(sizeof(std::int64_t))));
    sums_ = result.sums;
    return forward(problem, result, threads_, *frame_.job.interrupt);
  }

  // A bias that several heads share is summed head after head.
  bool shares_bias() const {
    const MutableTensor& dmask = gradients_.dmask;
    return dmask && (dmask.batch_offsets || (problem_.B > 1 && dmask.batch_stride == 0) ||
                     (problem_.H > 1 && dmask.head_stride == 0));
  }

  void reserve() {
    const std::int64_t rows = problem_.B * problem_.H * problem_.T, scratch_bytes = kernel_.scratch_bytes(plan_);
    backward_ = {&gradients_, nullptr, nullptr, sums_, nullptr, chunk_of_score(problem_.E, problem_.T),
                 bool(gradients_.dq) || gradients_.dscale || problem_.scoring.additive, rows_};
    part_bytes_ = backward_.parts ? (rows_ + plan_.tile.rows) * round_up(problem_.D, plan_.tile.panel) * real_bytes_ : 0;
    row_blocks_ = (rows_ + plan_.query_block - 1) / plan_.query_block;
    query_bytes_ = kernel_.query_bytes(plan_);
    const std::int64_t heads = problem_.B * problem_.G, head_bytes = part_bytes_ * plan_.splits + row_blocks_ * query_bytes_;
    const std::int64_t fit = most_bytes / std::max<std::int64_t>(head_bytes, 1);
    // What heads share is summed in their order. The last heads are cut finer, so that the workers end together.
    if (!shares_bias() && !gradients_.dadditive && fit >= threads_)
      alone_ = std::max<std::int64_t>(heads / threads_ - 1, 0) * threads_;
    together_ = shares_bias() ? 1 : std::clamp<std::int64_t>(fit, 1, heads - alone_);
    const std::int64_t slots = std::max<std::int64_t>(together_, alone_ > 0 ? threads_ : 0);
    const std::int64_t doubles = gradients_.dscale ? rows * std::int64_t(sizeof(double)) : 0;
    workspace_.emplace(round_up(2 * rows * real_bytes_, 64) + round_up(rows * real_bytes_, 64) + round_up(doubles, 64) + round_up(scratch_bytes * threads_, 64) +
                       round_up(slots * row_blocks_ * query_bytes_, 64) + round_up(slots * plan_.splits * part_bytes_, 64));
    backward_.lse = workspace_->take(2 * rows * real_bytes_);
    backward_.delta = workspace_->take(rows * real_bytes_);
    if (gradients_.dscale) backward_.dscale = reinterpret_cast<double*>(workspace_->take(doubles));
    scratch_ = workspace_->take(scratch_bytes * threads_);
    scratch_bytes_ = scratch_bytes;
    queries_ = workspace_->take(slots * row_blocks_ * query_bytes_);
    parts_ = workspace_->take(slots * plan_.splits * part_bytes_);
  }

  char* scratch(int worker) const { return scratch_ + worker * scratch_bytes_; }
  // A kv head being worked on has a slot: room for its packed queries and its parts of dq.
  char* queries(std::int64_t slot, std::int64_t block) const { return queries_ + (slot * row_blocks_ + block) * query_bytes_; }
  char* parts(std::int64_t slot) const { return parts_ + slot * plan_.splits * part_bytes_; }

  // Query rows [row0, row1) of a kv head.
  Piece rows_of(std::int64_t head, std::int64_t row0, std::int64_t row1) const {
    return {head / problem_.G, head % problem_.G, row0, std::min(row1, rows_), 0, plan_.blocks};
  }
  Piece row_block(std::int64_t head, std::int64_t block) const {
    return rows_of(head, block * plan_.query_block, (block + 1) * plan_.query_block);
  }
  void pack_rows(std::int64_t head, std::int64_t slot, std::int64_t block, int worker) const {
    kernel_.queries(frame_.job, backward_, row_block(head, block), queries(slot, block), scratch(worker));
  }
  void run_slice(std::int64_t head, std::int64_t slot, std::int64_t slice, int worker) const {
    kernel_.slice(frame_.job, backward_, rows_of(head, 0, rows_), slice, queries(slot, 0), parts(slot) + slice * part_bytes_,
                  {worker, scratch(worker)});
  }
  void fold_rows(std::int64_t head, std::int64_t slot, std::int64_t block, int worker) const {
    kernel_.fold(frame_.job, backward_, row_block(head, block), queries(slot, block), {parts(slot), part_bytes_}, scratch(worker));
  }
  std::int64_t folds() const { return backward_.parts ? row_blocks_ : 0; }

  // The first `count` kv heads, each by one worker: what it packs and sums stays in its cache, and no worker waits.
  bool run_alone(std::int64_t count) {
    return frame_.deal(count, [&](std::int64_t head, int worker) {
      for (std::int64_t i = 0; i < row_blocks_; ++i) pack_rows(head, worker, i, worker);
      for (std::int64_t i = 0; i < plan_.splits; ++i) run_slice(head, worker, i, worker);
      for (std::int64_t i = 0; i < folds(); ++i) fold_rows(head, worker, i, worker);
    });
  }

  // kv heads [first, first + count), each by all workers.
  bool run_together(std::int64_t first, std::int64_t count) {
    const auto deal = [&](std::int64_t pieces, auto work) {
      return frame_.deal(count * pieces, [&](std::int64_t i, int worker) {
        (this->*work)(first + i / pieces, i / pieces, i % pieces, worker);
      });
    };
    if (!deal(row_blocks_, &BackwardCall::pack_rows)) return false;
    // A bias that all keys share is summed slice after slice.
    if (gradients_.dmask && gradients_.dmask.column_stride == 0) {
      for (std::int64_t i = 0; i < count * plan_.splits; ++i)
        run_slice(first + i / plan_.splits, i / plan_.splits, i % plan_.splits, 0);
    } else if (!deal(plan_.splits, &BackwardCall::run_slice)) {
      return false;
    }
    if (frame_.job.interrupt->requested(0)) return false;
    sum_over_parts(count);
    return deal(folds(), &BackwardCall::fold_rows);
  }

  // Gradients of the weights of additive attention, which all heads share.
  void sum_over_parts(std::int64_t count) {
    const std::int64_t wide = round_up(problem_.D, plan_.tile.panel);
    for (std::int64_t i = 0; gradients_.dadditive && i < count * plan_.splits; ++i)
      for (std::int64_t a = 0; a < problem_.D; ++a) gradients_.dadditive[a] += real(parts(0) + i * part_bytes_, rows_ * wide + a);
  }

  double real(const void* array, std::int64_t i) const {
    return real_bytes_ == sizeof(double) ? static_cast<const double*>(array)[i] : static_cast<const float*>(array)[i];
  }

  // The gradient of a sink is the sum of -p * delta over rows, p being its weight; and the scale's sums.
  void sum_over_rows() {
    for (std::int64_t h = 0; h < problem_.H; ++h) {
      double sink = 0, scale = 0;
      for (std::int64_t b = 0; b < problem_.B; ++b)
        for (std::int64_t t = 0; t < problem_.T; ++t) {
          if (!problem_.scoring.has_query(b, t)) continue;
          const std::int64_t i = (b * problem_.H + h) * problem_.T + t;
          const double lse = gradients_.dsinks ? real(gradients_.logsumexp, i) : 0;
          // -inf: the row has no weights at all, neither of a key nor of its sink.
          if (gradients_.dsinks && lse != -HUGE_VAL) sink -= std::exp(gradients_.sinks[h] - lse) * real(backward_.delta, i);
          if (gradients_.dscale) scale += backward_.dscale[i];
        }
      if (gradients_.dsinks) gradients_.dsinks[h] = sink;
      if (gradients_.dscale) gradients_.dscale[h] = scale;
    }
  }

  const Problem& problem_;
  const Gradients& gradients_;
  const GradientTable& kernel_;
  const Plan plan_;
  const std::int64_t real_bytes_, rows_;  // query rows of a kv head
  const int threads_;
  Frame frame_;
  Backward backward_{};
  std::int64_t part_bytes_ = 0, query_bytes_ = 0, row_blocks_ = 0, scratch_bytes_ = 0, alone_ = 0, together_ = 1;
  std::optional<Workspace> workspace_, again_;
  const void* sums_ = nullptr;
  char *scratch_ = nullptr, *queries_ = nullptr, *parts_ = nullptr;
};

}  // namespace

bool backward(const Problem& problem, const Gradients& gradients, int threads, Interrupt& interrupt) {
  const bool wide = problem.q.dtype == DType::f64;
  const NumberTables& tables = *kernel().numbers;
  return BackwardCall(problem, gradients, wide ? tables.gradients_f64 : tables.gradients_f32,
                      wide ? sizeof(double) : sizeof(float), threads, interrupt)
      .run();
}

}  // namespace levelhead
