// The types of the account: in which part of levelhead::forward the cycles of a dense head go, once per ISA
// (account_*.cpp). For measuring only (docs/kernel.md); nothing here is linked into the library.
#pragma once

#include "attention.h"
#include "kernel.h"
#include "ladder.h"

namespace levelhead::ladder {

// How far a run goes: each stage does what the one before it does, and one thing more. The differences are the account.
enum class Stage { pack, spans, scores, maxima, exponentials, softmax, values, output, statistics };
constexpr int stage_count = 9;

struct Account {
  const char* isa;
  Tile tile;
  std::int64_t (*bytes)(const Plan&);  // of the memory that `run` needs
  // One head, up to and including a stage, with the functions of the core, in its order. After `output` the result is there,
  // with the same bits; after `statistics` it is not: they take the place of the plain softmax, and nothing follows.
  void (*run)(const Job& job, Stage stage, char* memory);
};

}  // namespace levelhead::ladder
