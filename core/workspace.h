// Memory for one call, kept for the next one.
//
// Fresh pages cost more than the work of a small call, so the last workspace is kept, up to a cap. One slot,
// taken and given back by atomic exchange: no lock that a fork could leave held, and concurrent callers
// allocate their own.
#pragma once

#include <cstddef>

namespace levelhead {

class Workspace {
 public:
  static constexpr std::size_t kept_bytes = std::size_t(64) << 20;

  explicit Workspace(std::size_t bytes);  // aligned to 64; throws std::bad_alloc
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  // The next `bytes` of it, aligned to 64.
  char* take(std::size_t bytes);

 private:
  struct Block;
  Block* block_;
  std::size_t taken_ = 0;
};

}  // namespace levelhead
