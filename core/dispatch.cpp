#include "dispatch.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "kernel.h"
#if defined(LEVELHEAD_X86)
#include "cpu.h"
#endif

extern "C" {
extern const levelhead::NumberTables levelhead_kernel_baseline;
#if defined(LEVELHEAD_X86)
extern const levelhead::NumberTables levelhead_kernel_avx2, levelhead_kernel_avx2x16, levelhead_kernel_avx512;
extern const levelhead::KernelTable levelhead_kernel_avx512bf16;
#endif
}

namespace levelhead {
namespace {

bool always() { return true; }

#if defined(LEVELHEAD_X86)
bool has_avx2() { return this_cpu().avx2; }
bool has_avx512() { return this_cpu().avx512; }
bool has_avx512bf16() { return this_cpu().avx512bf16; }
#endif

struct Candidate {
  Kernel kernel;
  bool (*runs_here)();
  bool eligible;  // may be chosen by default
};

// Plainest first; the last eligible one that runs here is the choice.
const Candidate candidates[] = {
    {{"baseline", &levelhead_kernel_baseline, nullptr}, always, true},
#if defined(LEVELHEAD_X86)
    {{"avx2x16", &levelhead_kernel_avx2x16, nullptr}, has_avx2, false},
    {{"avx2", &levelhead_kernel_avx2, nullptr}, has_avx2, true},
    {{"avx512", &levelhead_kernel_avx512, nullptr}, has_avx512, true},
    {{"avx512bf16", &levelhead_kernel_avx512, &levelhead_kernel_avx512bf16}, has_avx512bf16, true},
#endif
};

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

const Kernel* find(const std::string& name, const char* source) {
  for (const Candidate& candidate : candidates)
    if (name == candidate.kernel.name && candidate.runs_here()) return &candidate.kernel;
  throw std::invalid_argument(std::string(source) + ": expected one of " + joined(available_isas()) +
                              " (what this CPU can run), got '" + name + "'");
}

const Kernel* choose() {
  if (const char* name = std::getenv("LEVELHEAD_ISA"); name && *name) return find(name, "LEVELHEAD_ISA");
  const Kernel* best = nullptr;
  for (const Candidate& candidate : candidates)
    if (candidate.eligible && candidate.runs_here()) best = &candidate.kernel;
  return best;
}

std::atomic<const Kernel*> chosen{nullptr};

}  // namespace

const Kernel& kernel() {
  const Kernel* current = chosen.load(std::memory_order_acquire);
  if (!current) chosen.store(current = choose(), std::memory_order_release);  // a concurrent caller chooses the same
  return *current;
}

std::vector<std::string> built_isas() {
  std::vector<std::string> names;
  for (const Candidate& candidate : candidates) names.emplace_back(candidate.kernel.name);
  return names;
}

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Candidate& candidate : candidates)
    if (candidate.runs_here()) names.emplace_back(candidate.kernel.name);
  return names;
}

std::string current_isa() { return kernel().name; }

void choose_isa(const std::string& name) { chosen.store(find(name, "isa"), std::memory_order_release); }

}  // namespace levelhead
