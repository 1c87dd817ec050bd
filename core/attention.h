// The one public header of the core: what a problem is, forward() and backward().
//
// The core works on pointers, sizes and strides. It uses no Python, no framework and no model, and allocates
// O(tokens * width) scratch. The caller has checked shapes and dtypes.
//
// Letters: B batch rows, H query heads, G key/value heads, T queries, S keys, D key width, E value width.
#pragma once

#include <cstdint>

namespace levelhead {

class Interrupt;  // threads.h

enum class DType : std::uint8_t { f32, f64, f16, bf16, boolean };

// A (B, heads, rows, columns) array with strides in bytes: any sign, zero included.
// Leading dimensions that do not collapse into one stride are a table of offsets.
template <class Byte>
struct View {
  Byte* data = nullptr;
  DType dtype = DType::f32;
  const std::int64_t* batch_offsets = nullptr;
  std::int64_t batch_stride = 0, head_stride = 0, row_stride = 0, column_stride = 0;

  [[gnu::always_inline]] Byte* at(std::int64_t b, std::int64_t head, std::int64_t row) const {
    const std::int64_t batch = batch_offsets ? batch_offsets[b] : b * batch_stride;
    return data + batch + head * head_stride + row * row_stride;
  }
  [[gnu::always_inline]] explicit operator bool() const { return data != nullptr; }
};
using Tensor = View<const char>;
using MutableTensor = View<char>;

// Positions of tokens in the whole sequence: index i of the concatenated runs, plus a start per batch row.
// A plain sequence is one run {0, n, 1}; shards and stripes are others. Causality, windows, lengths,
// ALiBi and dropout depend on positions only, so that a shard gives the same results as the whole.
struct Run {
  std::int64_t start, length, stride;
};
struct Positions {
  const Run* runs = nullptr;
  std::int64_t run_count = 0;
  const std::int64_t* batch_start = nullptr;  // (B,) or null: 0

  // The position of a token, batch_start left out.
  [[gnu::always_inline]] std::int64_t in_runs(std::int64_t index) const {
    const Run* run = runs;
    while (index >= run->length) index -= run++->length;
    return run->start + index * run->stride;
  }
};

// Positions lie within +-2^61, so distances within 2^62: a window as wide as that is none.
constexpr std::int64_t unlimited = std::int64_t(1) << 62;

// What happens to a logit between the dot product and the softmax, in this order:
// scale, softcap, bias and ALiBi, hide. A logit of -inf is hidden: there is no other law.
struct Scoring {
  const double* scale = nullptr;  // (H,)
  // Additive attention instead of the dot product: s = sum of additive[a] * tanh(x_a + y_a), where q and k hold x and y
  // times 2 log2 e. Gradients are by x and y.
  const void* additive = nullptr;  // (D,) of the compute type
  bool cosine = false;            // q and k are normalised first; a zero vector stays zero
  bool log_n = false;             // each row also times ln(keys left to it by position and segment)
  bool causal = false;
  std::int64_t left = unlimited, right = unlimited;  // window: p - left <= j <= p + right
  double softcap = 0;                                // 0: none
  const double* alibi = nullptr;                     // (H,) slopes: s -= slope * |p - j|
  Tensor mask;                                       // boolean (true: visible) or a bias to add
  const std::int64_t* key_lengths = nullptr;         // (B,)
  // (B,) or null. A query whose position without batch_start is not below its batch row's length does not exist: output 0,
  // logsumexp -inf, the identity as state, no gradient to or from it. Its numbers are never used.
  const std::int64_t* query_lengths = nullptr;
  const std::int64_t* query_segments = nullptr;      // (B, T)
  const std::int64_t* key_segments = nullptr;        // (B, S)
  Positions queries, keys;
  double dropout = 0;
  std::uint64_t seed = 0;
  std::int64_t first_head = 0;  // number of head 0 in the whole model: dropout depends on it

  // Whether query_lengths leaves query t of batch row b, or any query of it.
  [[gnu::always_inline]] bool has_query(std::int64_t b, std::int64_t t) const {
    return !query_lengths || queries.in_runs(t) < query_lengths[b];
  }
  [[gnu::always_inline]] bool has_queries(std::int64_t b) const {
    bool any = !query_lengths;
    for (const Run* run = queries.runs; !any && run != queries.runs + queries.run_count; ++run) {
      const std::int64_t last = run->start + (run->length - 1) * run->stride;
      any = run->length > 0 && (last < run->start ? last : run->start) < query_lengths[b];
    }
    return any;
  }
};

struct Problem {
  std::int64_t B = 0, H = 0, G = 0, T = 0, S = 0, D = 0, E = 0;
  Tensor q, k, v;  // v may be absent: statistics only
  Scoring scoring;
};

// What to write: the output, sinks applied, or the state of every row (state.h), or both.
// The state arrays are C-contiguous in the compute type: float, or double when the inputs are; logits in units of ln 2.
struct Result {
  MutableTensor out;
  const double* sinks = nullptr;   // (H,) one more logit in the denominator of out
  void* logsumexp = nullptr;       // (B, H, T) of the compute type, natural, sinks included: an input of backward()
  void* acc = nullptr;             // (B, H, T, E)
  void* sums = nullptr;            // (B, H, T, row_sums)
  std::int64_t* counts = nullptr;  // (B, H, T, row_counts)
  const std::int64_t* first_keys = nullptr;  // (B, T): the key whose logit `sums` keeps as the first; null: that at position 0
};

// Computes on up to `threads` threads; false when interrupted (the results are then unspecified).
// Throws std::bad_alloc when there is no memory for the scratch.
bool forward(const Problem& problem, const Result& result, int threads, Interrupt& interrupt);

// Further inputs of backward(), and its outputs. Arrays of the compute type are C-contiguous.
struct Gradients {
  Tensor out, dout;                            // (B, H, T, E)
  const void* logsumexp = nullptr;             // (B, H, T) of the compute type: natural, sinks included
  const void* dlogsumexp = nullptr;            // the same, or null: zero
  const double* sinks = nullptr;               // (H,)
  // (B, H, T, row_sums) of forward() over all keys, where the problem has only some of them; null: it has them all. Used for
  // rows whose logsumexp is so far from zero that its rounding would be an error of their weights.
  const void* sums = nullptr;
  MutableTensor dq, dk, dv;                    // what is absent is not computed
  MutableTensor dmask;                         // of the compute type, zero before; stride 0 where the bias was broadcast
  double *dsinks = nullptr, *dscale = nullptr;  // (H,)
  double* dadditive = nullptr;                  // (D,)
};

// Guarantees as for forward(): O(tokens * width) scratch, the same bits for any number of threads.
bool backward(const Problem& problem, const Gradients& gradients, int threads, Interrupt& interrupt);

// Finished states as forward() wrote them: acc (B, H, T, E) and sums (B, H, T, row_sums) of the compute type.
struct States {
  std::int64_t B, H, T, E;
  DType compute;
  const void *acc, *sums;
};

// Reads the output off finished states with the code forward() uses, hence with the same bits. `sinks` is (H,) or null.
void finish(const States& states, const double* sinks, const MutableTensor& out);

// 2^x for x <= 0 as the kernel computes it; n numbers of the compute type.
void exponential(DType compute, const void* x, void* y, std::int64_t n);

}  // namespace levelhead
