#include "machine.h"

#include <algorithm>
#include <vector>

#include "kernel.h"
#include "threads.h"

namespace levelhead {
namespace {

// body(part) for every part, and the sum of what it returns, in order.
template <class Number, class Body>
Number sum_over(std::int64_t parts, int threads, const Body& body) {
  struct Work {
    const Body& body;
    std::vector<Number> results;
  } work{body, std::vector<Number>(static_cast<std::size_t>(parts))};
  Interrupt never;
  parallel_for(
      parts, threads,
      [](void* context, std::int64_t part, int) {
        Work& shared = *static_cast<Work*>(context);
        shared.results[static_cast<std::size_t>(part)] = shared.body(part);
      },
      &work, never);
  Number total = 0;
  for (const Number result : work.results) total += result;
  return total;
}

}  // namespace

std::int64_t burn(std::int64_t rounds, int threads) {
  return sum_over<std::int64_t>(threads, threads, [&](std::int64_t) { return kernel().numbers->burn(rounds); });
}

double sweep(const float* x, std::int64_t n, std::int64_t piece, int threads) {
  return sum_over<double>((n + piece - 1) / piece, threads, [&](std::int64_t part) {
    return static_cast<double>(kernel().numbers->sweep(x + part * piece, std::min(piece, n - part * piece)));
  });
}

}  // namespace levelhead
