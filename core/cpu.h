// Which vector instructions this x86 CPU has, of which the operating system also saves the registers. Asked of the CPU:
// the compilers' own answer (__builtin_cpu_supports) needs a table that some of their runtime libraries do not have.
#pragma once

#include <cpuid.h>

namespace levelhead {

struct Cpu {
  bool avx2 = false;  // with fma and f16c
  bool avx512 = false;  // f, vl, bw and dq
  bool avx512bf16 = false;
};

inline Cpu this_cpu() {
  Cpu found;
  unsigned a, b, c, d;
  const auto has = [](unsigned word, int bit) { return (word >> bit & 1) != 0; };
  if (!__get_cpuid(1, &a, &b, &c, &d)) return found;
  constexpr int fma = 12, osxsave = 27, avx = 28, f16c = 29;  // of c
  if (!has(c, fma) || !has(c, osxsave) || !has(c, avx) || !has(c, f16c)) return found;

  unsigned saved, high;
  __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  constexpr unsigned vectors = 0x06, wide_vectors = 0xe6;
  if ((saved & vectors) != vectors || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
  const unsigned last_page = a;
  found.avx2 = has(b, 5);
#if defined(__APPLE__)  // it begins to save the wide registers when they are first used
  const bool wide_saved = true;
#else
  const bool wide_saved = (saved & wide_vectors) == wide_vectors;
#endif
  constexpr int f = 16, dq = 17, bw = 30, vl = 31;  // of b
  found.avx512 = found.avx2 && wide_saved && has(b, f) && has(b, dq) && has(b, bw) && has(b, vl);
  found.avx512bf16 = found.avx512 && last_page >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && has(a, 5);
  return found;
}

}  // namespace levelhead
