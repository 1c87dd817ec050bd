// threads.cpp: the pool behind parallel_for, and the count of CPUs that are really ours.
//
// One pool per process, started on first use and never torn down: joining threads from a static destructor, or
// in a forked child where they do not exist, is how thread pools hang. It serves one loop at a time. There is no
// queue: a loop is published through one atomic word (`admission`), idle workers come in if they are quick enough,
// and the caller never waits for a worker that has not come in. So a loop too small to be worth waking anybody
// costs the caller the wake-up call and nothing more.

#include "threads.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <mutex>
#include <new>
#include <thread>

#ifdef __linux__
#include <sched.h>
#endif

namespace levelhead {
namespace {

// ---- How many CPUs -------------------------------------------------------------------------------------------

// 0: not read yet. An atomic and not a function-local static, whose hidden lock a fork could copy while held.
std::atomic<int> known_quota{0};

int affinity() {
#ifdef __linux__
  cpu_set_t set;  // 1024 CPUs; on a larger machine the call fails and the line below counts
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

// CPUs we may keep busy: more threads than these only take turns.
int usable_cpus() {
  int quota = known_quota.load(std::memory_order_relaxed);
  if (quota == 0) {
    quota = cpu_quota("/proc/self/cgroup", "/sys/fs/cgroup");
    if (quota == 0) quota = max_threads;
    known_quota.store(quota, std::memory_order_relaxed);
  }
  return std::min(affinity(), quota);
}

// ---- Waiting -------------------------------------------------------------------------------------------------

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Polls for up to 50 us, about what a sleep and a wake-up cost together: a loop that follows closely on the last
// one finds its workers awake, and an idle process stays idle.
template <class Ready>
bool spin_until(Ready ready) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::microseconds(50);
  do {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return false;
}

// ---- The pool ------------------------------------------------------------------------------------------------

// Admission to a loop, one word: generation (32 bits, which loop) | seats (16, free ones) | inside (16, workers at work).
// A worker enters by exchanging a seat for a place inside, and the number of its seat is its worker number.
// The caller ends admission by removing the free seats, then waits until no worker is inside. Because it is one word, a
// late worker can neither miss that the loop is over nor enter the next one by mistake.
using Admission = std::uint64_t;
constexpr Admission one_inside = 1, one_seat = Admission{1} << 16, all_seats = Admission{0xffff} << 16;
constexpr std::uint32_t generation(Admission word) { return static_cast<std::uint32_t>(word >> 32); }
constexpr int seats(Admission word) { return static_cast<int>((word & all_seats) >> 16); }
constexpr int inside(Admission word) { return static_cast<int>(word & 0xffff); }

struct Loop {
  std::int64_t count;
  Task task;
  void* context;
  Interrupt* interrupt;
  std::fenv_t environment;  // the caller's
};

// Runs indices of the loop until `next` has none left, or it is interrupted.
void take_indices(const Loop& loop, std::atomic<std::int64_t>& next, int worker) {
  while (!loop.interrupt->requested(worker)) {
    const std::int64_t index = next.fetch_add(1, std::memory_order_relaxed);
    if (index >= loop.count) return;
    loop.task(loop.context, index, worker);
  }
}

class Pool {
 public:
  std::atomic<bool> taken{false};  // by one caller at a time
  bool run(const Loop& wanted, int threads);

 private:
  void grow(int workers);
  void serve();
  void wait_for_others();

  Loop loop{};  // written while there are no seats and no worker is inside; read only by workers inside
  const int cpus = usable_cpus();
  int started = 0;                // threads that exist, the callers not counted
  std::atomic<bool> spin{false};  // whether every thread of the last loop had a CPU to itself

  // Both are written often by all workers: a cache line each, apart from what is only read.
  alignas(64) std::atomic<Admission> admission{0};
  alignas(64) std::atomic<std::int64_t> next{0};

  alignas(64) std::mutex mutex;   // guards no data, only the time between a look at `admission` and sleeping
  std::condition_variable wake;   // workers wait here for a loop
  std::condition_variable empty;  // the caller waits here for the last worker to leave
};

std::atomic<Pool*> current{nullptr};

Pool* pool() {
  Pool* known = current.load(std::memory_order_acquire);
  if (known) return known;
  Pool* fresh = new (std::nothrow) Pool;
  if (fresh && current.compare_exchange_strong(known, fresh, std::memory_order_acq_rel)) return fresh;
  delete fresh;  // another thread was first; ours has started nothing yet
  return known;
}

// In a forked child no worker exists and any lock may be copied held. So the child forgets the pool, memory and
// all (a few hundred bytes), and starts its own when it first needs one. Registered when the library is loaded:
// a lazy registration would itself need a lock.
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] {
  current.store(nullptr, std::memory_order_relaxed);
  known_quota.store(0, std::memory_order_relaxed);
});

// Workers leave signals to the program's own threads: Python handles SIGINT on its main thread, and a handler run
// here would find no interpreter. Faults stay deliverable, since they go to the thread that caused them, and a
// crash reporter needs them.
void Pool::grow(int workers) {
  if (started >= workers) return;
  sigset_t blocked, before;
  sigfillset(&blocked);
  for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) sigdelset(&blocked, fault);
  pthread_sigmask(SIG_SETMASK, &blocked, &before);  // a new thread starts with its creator's mask
  try {
    for (; started < workers; ++started) std::thread(&Pool::serve, this).detach();
  } catch (const std::exception&) {
    // No more threads available (a pids limit, memory): the existing ones do the work.
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Pool::serve() {
  std::uint32_t served = 0;  // the last loop this worker entered; to enter it twice would find no index left
  const auto can_enter = [&](Admission now) { return seats(now) > 0 && generation(now) != served; };
  const auto open = [&] { return can_enter(admission.load(std::memory_order_relaxed)); };
  for (;;) {
    if (!spin.load(std::memory_order_relaxed) || !spin_until(open)) {
      std::unique_lock lock(mutex);
      wake.wait(lock, open);
    }
    Admission now = admission.load(std::memory_order_relaxed);
    bool entered = false;
    while (!entered && can_enter(now))  // acquire: what the caller wrote before it offered seats
      entered = admission.compare_exchange_weak(now, now - one_seat + one_inside, std::memory_order_acquire,
                                                std::memory_order_relaxed);
    if (!entered) continue;

    served = generation(now);
    std::fesetenv(&loop.environment);  // about 50 ns; else rows of a caller that flushes denormals would depend on the thread
    take_indices(loop, next, seats(now));

    now = admission.fetch_sub(one_inside, std::memory_order_release) - one_inside;  // release: our results
    if (inside(now) == 0 && seats(now) == 0) {
      { std::lock_guard lock(mutex); }  // not between the caller's look at `admission` and its sleep
      empty.notify_one();
    }
  }
}

bool Pool::run(const Loop& wanted, int threads) {
  grow(threads - 1);
  loop = wanted;
  std::fegetenv(&loop.environment);
  next.store(0, std::memory_order_relaxed);
  spin.store(threads <= cpus, std::memory_order_relaxed);
  {
    std::lock_guard lock(mutex);
    const Admission generation_now = generation(admission.load(std::memory_order_relaxed)) + Admission{1};
    admission.store(generation_now << 32 | static_cast<Admission>(threads - 1) * one_seat, std::memory_order_release);
  }
  if (threads - 1 >= started) {
    wake.notify_all();
  } else {
    for (int i = 1; i < threads; ++i) wake.notify_one();  // the others keep sleeping
  }
  take_indices(loop, next, 0);
  wait_for_others();
  return !loop.interrupt->requested(0);
}

void Pool::wait_for_others() {
  admission.fetch_and(~all_seats, std::memory_order_relaxed);
  const auto left = [&] { return inside(admission.load(std::memory_order_acquire)) == 0; };
  if (left() || (spin.load(std::memory_order_relaxed) && spin_until(left))) return;
  for (;;) {
    loop.interrupt->requested(0);
    // The callback may run anything, even a signal handler that forks. The child has no workers that could leave,
    // and the mutex may stay locked for ever, so the loop ends here, unfinished.
    if (current.load(std::memory_order_relaxed) != this) return loop.interrupt->stop();
    std::unique_lock lock(mutex);
    if (empty.wait_for(lock, Interrupt::interval, left)) return;
  }
}

// ---- A borrowed team -----------------------------------------------------------------------------------------

thread_local Team borrowed;
std::atomic<bool> forked{false};  // no team survives a fork
[[maybe_unused]] const int noticed = pthread_atfork(nullptr, nullptr, [] { forked.store(true, std::memory_order_relaxed); });

// One loop on a team. Its threads may start late; each leaves when no index is left.
struct Shift {
  Loop loop;
  int workers;
  const pthread_t caller = pthread_self();
  alignas(64) std::atomic<std::int64_t> next{0};
  alignas(64) std::atomic<int> came{1}, left{0};  // worker numbers given out, the caller's among them

  // The team's own barrier would also wait, but without checking for Ctrl-C.
  void wait_for_others() {
    const auto gone = [&] { return left.load(std::memory_order_acquire) + 1 >= came.load(std::memory_order_relaxed); };
    while (!spin_until(gone)) {
      loop.interrupt->requested(0);
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  void serve() {
    if (pthread_equal(caller, pthread_self())) {
      take_indices(loop, next, 0);
      return wait_for_others();
    }
    const int worker = came.fetch_add(1, std::memory_order_relaxed);
    std::fenv_t own;
    std::fegetenv(&own);
    std::fesetenv(&loop.environment);
    if (worker < workers) take_indices(loop, next, worker);
    std::fesetenv(&own);
    left.fetch_add(1, std::memory_order_release);
  }
};

bool run_on(const Team& team, const Loop& wanted, int workers) {
  Shift shift{wanted, workers};
  std::fegetenv(&shift.loop.environment);
  team.call([](void* data) { static_cast<Shift*>(data)->serve(); }, &shift, static_cast<unsigned>(team.size), 0);
  return !wanted.interrupt->requested(0);
}

}  // namespace

// ---- The functions of threads.h ---------------------------------------------------------------------------------

int cpu_quota(const std::string& membership, const std::string& mount) {
  double granted = 0.0;
  const auto limit = [&](double quota, double period) {  // the tightest of all ancestors counts
    if (quota > 0 && period > 0) granted = granted > 0 ? std::min(granted, quota / period) : quota / period;
  };
  std::ifstream lines(membership);
  for (std::string line; std::getline(lines, line);) {  // "0::/path" is v2, "3:cpu,cpuacct:/path" v1
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    line[first] = line[second] = ',';
    const bool v2 = second == first + 1, v1 = line.find(",cpu,", first) < second;
    if (!v1 && !v2) continue;
    // From our own group up to the mount, which in a container without its own cgroup namespace *is* our group
    // while the path printed is the host's and does not exist here.
    for (std::string path = line.substr(second + 1);; path.erase(path.rfind('/'))) {
      const std::string group = mount + (v1 ? "/cpu" : "") + path;
      double quota = 0, period = 0;  // stay 0 for "max", -1 and files that are not there
      if (v2) {
        std::ifstream(group + "/cpu.max") >> quota >> period;
      } else {
        std::ifstream(group + "/cpu.cfs_quota_us") >> quota;
        std::ifstream(group + "/cpu.cfs_period_us") >> period;
      }
      limit(quota, period);
      if (path.find('/') == std::string::npos) break;
    }
  }
  return static_cast<int>(std::ceil(std::min<double>(granted, max_threads)));
}

int default_threads() {
  int threads = std::min(usable_cpus(), max_threads);
  if (const char* text = std::getenv("LEVELHEAD_NUM_THREADS")) {
    char* end = nullptr;
    const long wanted = std::strtol(text, &end, 10);
    const bool digits_first = *text >= '0' && *text <= '9';  // strtol also takes spaces and a sign
    if (digits_first && *end == '\0' && wanted > 0) threads = static_cast<int>(std::min<long>(threads, wanted));
  }
  return threads;
}

bool Interrupt::requested(int worker) {
  if (stopped_.load(std::memory_order_relaxed)) return true;
  if (worker != 0 || !poll_) return false;
  const auto now = std::chrono::steady_clock::now();
  if (now - polled_ < interval) return false;
  if (poll_(context_)) stop();
  polled_ = std::chrono::steady_clock::now();  // after the callback, which may have waited long for the GIL
  return stopped_.load(std::memory_order_relaxed);
}

Borrow::Borrow(Team team) { borrowed = team; }
Borrow::~Borrow() { borrowed = {}; }

bool parallel_for(std::int64_t count, int threads, Task task, void* context, Interrupt& interrupt) {
  const auto useful = std::min<std::int64_t>({count, threads, max_threads});
  if (useful > 1 && borrowed.call && !forked.load(std::memory_order_relaxed))
    return run_on(borrowed, {count, task, context, &interrupt, {}}, static_cast<int>(useful));
  Pool* shared = useful > 1 ? pool() : nullptr;
  if (shared && !shared->taken.exchange(true, std::memory_order_acquire)) {
    const bool finished = shared->run({count, task, context, &interrupt, {}}, static_cast<int>(useful));
    shared->taken.store(false, std::memory_order_release);
    return finished;
  }
  for (std::int64_t index = 0; index < count && !interrupt.requested(0); ++index) task(context, index, 0);
  return !interrupt.requested(0);
}

}  // namespace levelhead
