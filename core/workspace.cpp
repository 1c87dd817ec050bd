#include "workspace.h"

#include <sys/mman.h>

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

  // Large blocks come from the system and go back to it: the C library would keep some of them.
  static constexpr std::size_t large = std::size_t(1) << 20;

  static Block* make(std::size_t bytes) {
    const std::size_t all = sizeof(Block) + bytes;
    void* memory = nullptr;
    if (all < large) {
      memory = std::aligned_alloc(line, all);
    } else {
      memory = mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (memory == MAP_FAILED) memory = nullptr;
    }
    if (!memory) throw std::bad_alloc();
    return new (memory) Block{bytes};
  }
  static void release(Block* block) {
    if (!block) return;
    const std::size_t all = sizeof(Block) + block->bytes;
    if (all < large)
      std::free(block);
    else
      munmap(block, all);
  }

  static std::atomic<Block*> kept;
};
std::atomic<Workspace::Block*> Workspace::Block::kept{nullptr};

Workspace::Workspace(std::size_t bytes) : block_(Block::kept.exchange(nullptr)) {
  bytes = whole_lines(bytes);
  if (block_ && block_->bytes >= bytes) return;
  Block::release(block_);
  block_ = Block::make(bytes);
}

Workspace::~Workspace() {
  Block* surplus = block_;
  if (block_->bytes <= kept_bytes) surplus = Block::kept.exchange(block_);
  Block::release(surplus);
}

char* Workspace::take(std::size_t bytes) {
  char* start = reinterpret_cast<char*>(block_ + 1) + taken_;
  taken_ += whole_lines(bytes);
  return start;
}

}  // namespace levelhead
