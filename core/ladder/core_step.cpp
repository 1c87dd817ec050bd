// The last step, levelhead::forward; and the same as a module of one function, for bench/tiles.py, which loads cores
// built with different constants side by side.
#include <chrono>
#include <exception>
#include <type_traits>

#include "attention.h"
#include "dispatch.h"
#include "ladder.h"
#include "threads.h"

namespace levelhead::ladder {

void run_core(const Head& head) {
  const auto rows = [&](auto* data, std::int64_t count) {
    const std::int64_t step = head.d * static_cast<std::int64_t>(sizeof(float));
    return View<std::remove_pointer_t<decltype(data)>>{data, DType::f32, nullptr, 0, count * step, step, sizeof(float)};
  };
  const auto bytes = [](const float* x) { return reinterpret_cast<const char*>(x); };
  const double scale = head.scale;
  const Run queries{0, head.T, 1}, keys{0, head.S, 1};
  Problem problem{1, 1, 1, head.T, head.S, head.d, head.d, rows(bytes(head.q), head.T), rows(bytes(head.k), head.S),
                  rows(bytes(head.v), head.S), {}};
  problem.scoring.scale = &scale;
  problem.scoring.queries = {&queries, 1, nullptr};
  problem.scoring.keys = {&keys, 1, nullptr};
  Result result;
  result.out = rows(reinterpret_cast<char*>(head.out), head.T);
  Interrupt never;
  forward(problem, result, 1, never);
}

}  // namespace levelhead::ladder

// Computes the head `calls` times on one thread; how long each took, in seconds. Not 0 when the ISA is not there.
extern "C" [[gnu::visibility("default")]] int levelhead_ladder_turn(const char* isa, const levelhead::ladder::Head* head,
                                                                    int calls, double* seconds) {
  using Clock = std::chrono::steady_clock;
  try {
    levelhead::choose_isa(isa);
    for (int i = 0; i < calls; ++i) {
      const auto begin = Clock::now();
      levelhead::ladder::run_core(*head);
      seconds[i] = std::chrono::duration<double>(Clock::now() - begin).count();
    }
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}
