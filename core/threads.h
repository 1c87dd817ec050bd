// threads.h: how many threads to use, and one loop that uses them.
//
// The core needs exactly one parallel shape: "run this for every index, and stop early on request". That is
// all there is here: no futures, no queues, no nested jobs, no OpenMP of our own (a second OpenMP runtime in one
// process crashes or is slow, and a fork after its first use hangs the child). A team that a caller's framework
// already keeps awake can be borrowed for a call, so that two pools do not compete for the same cores.
//
// Results cannot depend on the number of threads as long as a task's result depends on its index alone: which
// worker runs an index, and when, is the only thing that varies.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

namespace levelhead {

// The most workers one loop is ever given, the caller included.
inline constexpr int max_threads = 256;

// min(CPUs this thread may run on, CPUs its cgroup pays for, LEVELHEAD_NUM_THREADS if that is a positive
// integer), at least 1. Affinity and environment are read anew on each call (one system call), the quota once.
int default_threads();

// CPUs granted by the cgroup (v1 or v2) quotas of the process, rounded up; 0 when there is no limit.
// `membership` is /proc/self/cgroup and `mount` /sys/fs/cgroup, except in the tests. Costs file reads.
int cpu_quota(const std::string& membership, const std::string& mount);

// A request to stop. Any worker may read it; only worker 0, the thread that called parallel_for, calls the callback.
class Interrupt {
 public:
  static constexpr std::chrono::milliseconds interval{20};  // between two calls of it: below what a person notices

  Interrupt() = default;
  // `poll(context)` returns true to stop; it may take locks (the GIL) that other workers never need.
  Interrupt(bool (*poll)(void*), void* context)
      : poll_(poll), context_(context), polled_(std::chrono::steady_clock::now()) {}
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  // Costs one relaxed load; for worker 0 with a `poll` also one reading of the clock (about 25 ns).
  bool requested(int worker);
  void stop() { stopped_.store(true, std::memory_order_relaxed); }

 private:
  bool (*poll_)(void*) = nullptr;
  void* context_ = nullptr;
  std::chrono::steady_clock::time_point polled_;  // touched by worker 0 only
  std::atomic<bool> stopped_{false};
};

// A task must not throw. 0 <= worker < threads, and no two tasks run at once with the same worker, so that
// `worker` can name a workspace.
using Task = void (*)(void* context, std::int64_t index, int worker);

// Runs task for every index in [0, count), handed out in increasing order by one atomic counter; the caller
// takes part as worker 0 and keeps checking `interrupt` while it waits for the others. Returns false when
// interrupted: then some indices were not run, or not to their end.
//
// Any number of threads may call it at once: one that finds the pool in use works alone. Tasks run in
// the floating-point environment (rounding, flush to zero) of the caller, on every thread.
bool parallel_for(std::int64_t count, int threads, Task task, void* context, Interrupt& interrupt);

// Threads of another runtime: runs body(data) on `threads` of them at once, the caller's own among them, and returns
// when all have returned. This is GOMP_parallel's signature.
using TeamCall = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);
struct Team {
  TeamCall call = nullptr;  // null: there is none
  int size = 0;             // always called with this many: a team of another size would be built anew each time
};

// While it lives, the loops of this thread run on `team` instead of the pool. Not in a forked child, where the threads
// of a team do not exist: there the pool serves again.
class Borrow {
 public:
  explicit Borrow(Team team);
  ~Borrow();
  Borrow(const Borrow&) = delete;
  Borrow& operator=(const Borrow&) = delete;
};

}  // namespace levelhead
