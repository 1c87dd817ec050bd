// The pool: every index once and in order, whatever happens around it: other callers, interrupts, forks.

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cfenv>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <thread>

#ifdef __linux__
#include <sched.h>
#endif

#include "check.h"
#include "threads.h"

using namespace levelhead;
using Clock = std::chrono::steady_clock;

namespace {

double milliseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// parallel_for over a lambda (index, worker).
template <class Body>
bool loop(std::int64_t count, int threads, Body body, Interrupt& interrupt) {
  return parallel_for(
      count, threads,
      [](void* context, std::int64_t index, int worker) { (*static_cast<Body*>(context))(index, worker); },
      &body, interrupt);
}

template <class Body>
bool loop(std::int64_t count, int threads, Body body) {
  Interrupt never;
  return loop(count, threads, body, never);
}

// Runs a loop that counts its visits; true when every index was visited once by a legal worker.
bool visits_each_once(std::int64_t count, int threads) {
  std::vector<std::atomic<int>> visits(static_cast<std::size_t>(count));
  std::atomic<int> strangers{0};
  const bool finished = loop(count, threads, [&](std::int64_t index, int worker) {
    visits[static_cast<std::size_t>(index)]++;
    if (worker < 0 || worker >= threads) strangers++;
  });
  for (auto& times : visits)
    if (times != 1) return false;
  return finished && strangers == 0;
}

#ifndef __SANITIZE_THREAD__
// Runs `body` in a forked child that is killed after 5 seconds; true when it returned true in time.
template <class Body>
bool in_child(Body body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(5);
    _exit(body() ? 0 : 1);
  }
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}
#endif

// A loop on another thread, held inside its tasks until released.
class BusyPool {
 public:
  explicit BusyPool(int threads)
      : caller_([this, threads] {
          loop(threads, threads, [this](std::int64_t, int) {
            inside_++;
            while (!release_) sleep_ms(1);
          });
        }) {
    while (inside_ == 0) sleep_ms(1);
  }
  ~BusyPool() {
    release_ = true;
    caller_.join();
  }

 private:
  std::atomic<bool> release_{false};
  std::atomic<int> inside_{0};
  std::thread caller_;
};

double cpu_ms() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto ms = [](timeval t) { return 1e3 * static_cast<double>(t.tv_sec) + 1e-3 * static_cast<double>(t.tv_usec); };
  return ms(usage.ru_utime) + ms(usage.ru_stime);
}

}  // namespace

TEST(every_index_once) {
  for (int threads : {1, 2, 3, 7, 1000, 0, -1})
    for (std::int64_t count : {0, 1, 2, 3, 7, 8, 100, 10000})
      if (threads > 0)
        CHECK(visits_each_once(count, threads), "threads %d count %lld", threads, static_cast<long long>(count));
      else
        CHECK(loop(count, threads, [](std::int64_t, int worker) { CHECK(worker == 0); }));
}

TEST(many_small_loops_back_to_back) {
  for (int i = 0; i < 3000; ++i) CHECK(visits_each_once(2 + i % 5, 2 + i % 3));
}

TEST(handed_out_in_increasing_order) {
  for (int threads : {1, 2, 3, 7}) {
    std::vector<std::int64_t> last(static_cast<std::size_t>(threads), -1);  // by worker: no two tasks share one
    std::atomic<bool> ordered{true};
    std::int64_t alone = 0;
    loop(5000, threads, [&](std::int64_t index, int worker) {
      if (index <= last[static_cast<std::size_t>(worker)]) ordered = false;
      last[static_cast<std::size_t>(worker)] = index;
      if (threads == 1 && index != alone++) ordered = false;
    });
    CHECK(ordered, "threads %d", threads);
  }
}

TEST(workers_really_run_at_once) {
  for (int threads : {2, 3, 7}) {
    std::atomic<int> arrived{0};
    const auto start = Clock::now();
    loop(threads, threads, [&](std::int64_t, int) {  // a barrier: passes only with all of them inside
      arrived++;
      while (arrived < threads && milliseconds_since(start) < 5000) std::this_thread::yield();
    });
    CHECK(milliseconds_since(start) < 5000, "threads %d, arrived %d", threads, arrived.load());
  }
}

TEST(several_callers_at_once) {
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c)
    callers.emplace_back([&, c] {
      for (int i = 0; i < 200; ++i) wrong += !visits_each_once(20 + c, 1 + (i + c) % 4);
    });
  for (auto& caller : callers) caller.join();
  CHECK(wrong == 0, "%d loops went wrong", wrong.load());
}

TEST(caller_that_finds_the_pool_taken_works_alone) {
  BusyPool busy(2);
  CHECK(loop(50, 4, [](std::int64_t, int worker) { CHECK(worker == 0); }));
}

TEST(loop_within_a_task) {
  std::atomic<int> inner{0};
  CHECK(loop(6, 3, [&](std::int64_t, int) { loop(5, 3, [&](std::int64_t, int) { inner++; }); }));
  CHECK(inner == 30, "%d", inner.load());
}

TEST(results_are_visible_to_the_caller) {  // plain memory, no atomics: TSan judges
  std::vector<double> values(4096);
  for (int round = 1; round <= 20; ++round) {
    loop(4096, 3, [&](std::int64_t i, int) { values[static_cast<std::size_t>(i)] = static_cast<double>(i * round); });
    double sum = 0;
    for (double value : values) sum += value;
    CHECK(sum == 4095.0 * 4096 / 2 * round);
  }
}

TEST(interrupt_reaches_a_worker_in_a_long_task) {
  for (int threads : {1, 2, 3}) {
    const auto start = Clock::now();
    Clock::time_point stopped_at{};
    struct Asked {
      Clock::time_point start, *stopped_at;
      std::thread::id caller;
    } asked{start, &stopped_at, std::this_thread::get_id()};
    Interrupt interrupt(
        [](void* context) {
          auto& seen = *static_cast<Asked*>(context);
          CHECK(std::this_thread::get_id() == seen.caller);  // never on a worker
          if (milliseconds_since(seen.start) < 60) return false;
          *seen.stopped_at = Clock::now();
          return true;
        },
        &asked);
    std::atomic<int> others{0};
    const bool finished = loop(threads, threads, [&](std::int64_t, int worker) {
      if (worker != 0) others++;
      if (worker == 0 && threads > 1) {  // the caller runs out of work and waits for the others
        while (others < threads - 1 && milliseconds_since(start) < 5000) sleep_ms(1);
        return;
      }
      while (!interrupt.requested(worker) && milliseconds_since(start) < 5000) sleep_ms(1);
    }, interrupt);
    CHECK(!finished);
    CHECK(stopped_at != Clock::time_point{} && milliseconds_since(stopped_at) < 100,
          "threads %d: %g ms after the answer", threads, milliseconds_since(stopped_at));
    CHECK(visits_each_once(100, threads));  // the pool is as good as new
  }
}

TEST(stop_from_a_task) {
  for (int threads : {1, 2, 7}) {
    Interrupt interrupt;
    CHECK(!loop(100000, threads, [&](std::int64_t index, int) {
      if (index == 10) interrupt.stop();
    }, interrupt));
    CHECK(interrupt.requested(0) && interrupt.requested(5));
  }
}

TEST(asks_seldom) {
  int asks = 0;
  Interrupt interrupt([](void* count) { return ++*static_cast<int*>(count), false; }, &asks);
  const auto start = Clock::now();
  while (asks < 3 && milliseconds_since(start) < 10000) {  // a busy machine may stop this thread for long
    CHECK(!interrupt.requested(0));
    CHECK(!interrupt.requested(1));
  }
  CHECK(asks == 3 && milliseconds_since(start) >= 40, "%d asks in %g ms", asks, milliseconds_since(start));
}

// ThreadSanitizer aborts a forked child that starts threads ("dup thread with used id"), so its build, which is
// after races, leaves out the forks; the plain and the address build have them.
#ifndef __SANITIZE_THREAD__

TEST(fork_after_use) {
  CHECK(visits_each_once(100, 3));
  CHECK(in_child([] { return visits_each_once(100, 3) && visits_each_once(100, 5); }));
  CHECK(visits_each_once(100, 3));  // the parent's pool is unharmed
}

TEST(fork_of_a_fork) {
  CHECK(visits_each_once(100, 3));
  CHECK(in_child([] { return visits_each_once(50, 3) && in_child([] { return visits_each_once(50, 3); }); }));
}

TEST(fork_while_busy) {
  BusyPool busy(3);
  CHECK(in_child([] { return visits_each_once(100, 3); }));
}

TEST(fork_while_loops_come_and_go) {  // meets the pool's own locks at any moment
  std::atomic<bool> end{false};
  std::thread caller([&] {
    while (!end) visits_each_once(10, 3);
  });
  for (int i = 0; i < 20; ++i) CHECK(in_child([] { return visits_each_once(100, 3); }));
  end = true;
  caller.join();
}

TEST(fork_by_the_caller_in_the_middle_of_its_loop) {  // a signal handler may: the child's loop ends, unfinished
  struct Forked {
    pid_t child = -1;
  } forked;
  Interrupt interrupt(
      [](void* context) {
        auto& self = *static_cast<Forked*>(context);
        if (self.child == -1) self.child = fork();
        if (self.child == 0) alarm(5);
        return false;
      },
      &forked);
  const auto start = Clock::now();
  std::atomic<bool> other{false};
  const bool finished = loop(2, 2, [&](std::int64_t, int worker) {
    if (worker != 0) other = true;
    while (!other && milliseconds_since(start) < 5000) sleep_ms(1);
    if (worker != 0) sleep_ms(200);
  }, interrupt);
  if (forked.child == 0) _exit(!finished && visits_each_once(100, 2) ? 0 : 1);
  CHECK(finished);
  int status = 0;
  if (forked.child > 0) CHECK(waitpid(forked.child, &status, 0) == forked.child && status == 0, "status %d", status);
}

#endif  // __SANITIZE_THREAD__

TEST(idle_workers_use_no_cpu) {
  for (int threads : {2, 7}) {  // with a CPU each, and without
    CHECK(visits_each_once(1000, threads));
    sleep_ms(10);  // past the spin
    const double before = cpu_ms();
    sleep_ms(300);
    CHECK(cpu_ms() - before < 10, "%g ms of CPU in 300 ms", cpu_ms() - before);
  }
}

TEST(a_waiting_caller_uses_no_cpu) {
  const auto start = Clock::now();
  const double before = cpu_ms();
  loop(2, 2, [&](std::int64_t, int) { sleep_ms(300); });
  CHECK(cpu_ms() - before < 30, "%g ms of CPU in %g ms", cpu_ms() - before, milliseconds_since(start));
}

TEST(workers_leave_signals_alone) {
  std::atomic<int> blocked{0}, faults_open{0}, workers{0};
  loop(64, 3, [&](std::int64_t, int worker) {
    if (worker == 0) return sleep_ms(1);
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, nullptr, &mask);
    workers++;
    blocked += sigismember(&mask, SIGINT) && sigismember(&mask, SIGTERM) && sigismember(&mask, SIGCHLD);
    faults_open += !sigismember(&mask, SIGSEGV);
  });
  CHECK(workers > 0 && blocked == workers && faults_open == workers);
  sigset_t mask;
  pthread_sigmask(SIG_SETMASK, nullptr, &mask);
  CHECK(!sigismember(&mask, SIGINT));  // and the caller has its own mask back
}

TEST(tasks_run_in_the_callers_floating_point_environment) {
  const auto inexact = [](int threads) {  // what every task computes; rounds differently in each mode
    std::vector<double> values(64);
    loop(64, threads, [&](std::int64_t i, int) {
      volatile double one = 1, three = 3;
      values[static_cast<std::size_t>(i)] = one / three;
      sleep_ms(1);
    });
    for (double value : values) CHECK(value == values[0]);
    return values[0];
  };
  const double nearest = inexact(3);
  std::fesetround(FE_UPWARD);
  const double up = inexact(3);
  std::fesetround(FE_TONEAREST);
  CHECK(up > nearest);
  CHECK(inexact(3) == nearest);
  CHECK(std::fegetround() == FE_TONEAREST);
#if defined(__x86_64__)
  const unsigned before = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(before | 0x8040);  // flush to zero, denormals are zero
  std::atomic<int> flushed{0};
  loop(64, 3, [&](std::int64_t, int) {
    volatile float tiny = std::numeric_limits<float>::denorm_min();
    flushed += tiny * 1.0f == 0.0f;
    sleep_ms(1);
  });
  __builtin_ia32_ldmxcsr(before);
  CHECK(flushed == 64, "%d of 64", flushed.load());
  CHECK(__builtin_ia32_stmxcsr() == before);
#endif
}

// A stand-in for OpenMP: `threads` bodies at once, the caller's among them, and back when all are.
void plain_team(void (*body)(void*), void* data, unsigned threads, unsigned) {
  std::vector<std::thread> others;
  for (unsigned i = 1; i < threads; ++i) others.emplace_back(body, data);
  body(data);
  for (std::thread& other : others) other.join();
}
// One without free threads, as inside a parallel region.
void lonely_team(void (*body)(void*), void* data, unsigned, unsigned) { body(data); }

TEST(a_borrowed_team_does_every_index_once) {
  for (const Team team : {Team{plain_team, 4}, Team{plain_team, 2}, Team{plain_team, 1}, Team{lonely_team, 4}}) {
    const Borrow borrow(team);
    for (std::int64_t count : {0, 1, 2, 3, 100})
      for (int threads : {1, 2, 4}) CHECK(visits_each_once(count, threads), "%lld indices", static_cast<long long>(count));
  }
  CHECK(visits_each_once(100, 4));  // the pool again
}

TEST(a_borrowed_team_hears_the_interrupt) {
  const Borrow borrow(Team{plain_team, 3});
  Interrupt interrupt([](void*) { return true; }, nullptr);
  std::atomic<int> ran{0};
  const bool finished = loop(1000, 3, [&](std::int64_t, int worker) {
    ++ran;
    const auto start = Clock::now();  // one long task each: the caller must go on asking while it waits
    while (!interrupt.requested(worker) && milliseconds_since(start) < 5000) sleep_ms(1);
  }, interrupt);
  CHECK(!finished && ran <= 3, "%d tasks ran", ran.load());
}

TEST(a_borrowed_team_works_in_the_callers_floating_point_environment_and_keeps_its_own) {
  static std::atomic<int> spoilt{0};
  const TeamCall watchful = [](void (*body)(void*), void* data, unsigned, unsigned) {
    std::thread other([&] {
      const int before = std::fegetround();
      body(data);
      if (std::fegetround() != before) ++spoilt;
    });
    body(data);
    other.join();
  };
  std::atomic<int> strange{0};
  const Borrow borrow(Team{watchful, 2});
  std::fesetround(FE_UPWARD);
  loop(1000, 2, [&](std::int64_t, int) { strange += std::fegetround() != FE_UPWARD; });
  std::fesetround(FE_TONEAREST);
  CHECK(strange == 0 && spoilt == 0);
}

TEST(number_of_threads) {
  unsetenv("LEVELHEAD_NUM_THREADS");
  const int all = default_threads();
  CHECK(all >= 1 && all <= max_threads);
  setenv("LEVELHEAD_NUM_THREADS", "1", 1);
  CHECK(default_threads() == 1);
  for (const char* text : {"0", "-3", "", "many", "2x", " 1", "+1", "100000", "99999999999999999999"}) {
    setenv("LEVELHEAD_NUM_THREADS", text, 1);
    CHECK(default_threads() == all, "\"%s\"", text);
  }
  unsetenv("LEVELHEAD_NUM_THREADS");
#ifdef __linux__
  cpu_set_t before, one;
  sched_getaffinity(0, sizeof before, &before);
  CHECK(all <= CPU_COUNT(&before));
  CPU_ZERO(&one);
  for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++cpu)
    if (CPU_ISSET(cpu, &before)) CPU_SET(cpu, &one);
  if (sched_setaffinity(0, sizeof one, &one) == 0) CHECK(default_threads() == 1);
  sched_setaffinity(0, sizeof before, &before);
#endif
}

TEST(cgroup_quota) {
  namespace fs = std::filesystem;
  std::string text = (fs::temp_directory_path() / "levelhead_cgroup_XXXXXX").string();
  CHECK(mkdtemp(text.data()) != nullptr);
  const fs::path root = text;
  const auto write = [&](const char* path, const char* content) {
    fs::create_directories((root / path).parent_path());
    std::ofstream(root / path) << content;
  };
  const auto quota = [&](const char* membership) {
    write("membership", membership);
    return cpu_quota((root / "membership").string(), root.string());
  };
  CHECK(quota("0::/\n") == 0);  // no file at all
  write("a/b/cpu.max", "150000 100000\n");
  write("a/cpu.max", "max 100000\n");
  CHECK(quota("0::/a/b\n") == 2);  // 1.5 CPUs, rounded up
  CHECK(quota("0::/a\n") == 0);
  write("a/cpu.max", "50000 100000\n");
  CHECK(quota("0::/a/b\n") == 1);  // the parent is tighter
  CHECK(quota("0::/a/b/unknown/here\n") == 1);
  write("cpu.max", "300000 100000\n");
  CHECK(quota("0::/docker/host-side-name\n") == 3);  // the mount is our own group
  write("cpu/box/cpu.cfs_quota_us", "-1\n");
  write("cpu/box/cpu.cfs_period_us", "100000\n");
  CHECK(quota("7:memory:/box\n3:cpuacct,cpu:/box\n") == 0);
  write("cpu/box/cpu.cfs_quota_us", "400000\n");
  CHECK(quota("7:memory:/box\n3:cpuacct,cpu:/box\n") == 4);
  CHECK(quota("5:cpuset:/box\n") == 0);
  write("cpu/box/cpu.cfs_quota_us", "40000000000\n");
  CHECK(quota("3:cpu:/box\n") == max_threads);
  CHECK(quota("nonsense\n") == 0);
  CHECK(cpu_quota((root / "absent").string(), root.string()) == 0);
  fs::remove_all(root);
}
