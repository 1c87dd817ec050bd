// The machine's own limits, measured with the kernel's own vectors (kernel_machine.inl.h) on the pool's own threads.
#pragma once

#include <cstdint>

namespace levelhead {

// Runs `rounds` of register-only FMAs on each of `threads` threads; the flops done by all.
std::int64_t burn(std::int64_t rounds, int threads);

// The sum of n floats, each read once, by `threads` threads that take `piece` neighbours at a time.
double sweep(const float* x, std::int64_t n, std::int64_t piece, int threads);

}  // namespace levelhead
