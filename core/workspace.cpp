#include "workspace.h"

#include <atomic>
#include <cstdlib>
#include <new>

namespace levelhead {

namespace {
constexpr std::size_t line = 64;
constexpr std::size_t whole_lines(std::size_t bytes) { return (bytes + line - 1) / line * line; }
}  // namespace

struct alignas(line) Workspace::Block {
  std::size_t bytes;

  static std::atomic<Block*> kept;
};
std::atomic<Workspace::Block*> Workspace::Block::kept{nullptr};

Workspace::Workspace(std::size_t bytes) : block_(Block::kept.exchange(nullptr)) {
  bytes = whole_lines(bytes);
  if (block_ && block_->bytes >= bytes) return;
  std::free(block_);
  block_ = static_cast<Block*>(std::aligned_alloc(line, sizeof(Block) + bytes));
  if (!block_) throw std::bad_alloc();
  block_->bytes = bytes;
}

Workspace::~Workspace() {
  Block* surplus = block_;
  if (block_->bytes <= kept_bytes) surplus = Block::kept.exchange(block_);
  std::free(surplus);
}

char* Workspace::take(std::size_t bytes) {
  char* start = reinterpret_cast<char*>(block_ + 1) + taken_;
  taken_ += whole_lines(bytes);
  return start;
}

}  // namespace levelhead
