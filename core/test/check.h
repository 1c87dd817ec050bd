// check.h: the whole test harness. A test is a function; a failed check prints where and what, and the run goes
// on; main() returns the number of tests that failed. `test_x name` runs only the tests whose name contains it.
// It refuses to be a framework: no fixtures, no matchers.

#pragma once

#include <cstdio>
#include <cstring>
#include <vector>

namespace check {

struct Test {
  const char* name;
  void (*body)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

inline int failures = 0;  // of the test that is running

inline void failed(const char* file, int line, const char* what) {
  if (++failures <= 10) std::fprintf(stderr, "  %s:%d: %s\n", file, line, what);
}

struct Registered {
  Registered(const char* name, void (*body)()) { tests().push_back({name, body}); }
};

}  // namespace check

#define TEST(name)                                             \
  static void name();                                          \
  static const check::Registered registered_##name{#name, name}; \
  static void name()

// CHECK(condition), or CHECK(condition, "format", values...) to say what was seen.
#define CHECK(condition, ...)                                                        \
  do {                                                                               \
    if (!(condition)) {                                                              \
      char text_[512] = "";                                                          \
      int used_ = std::snprintf(text_, sizeof text_, "%s  ", #condition);            \
      __VA_OPT__(if (used_ < 400) std::snprintf(text_ + used_, sizeof text_ - used_, __VA_ARGS__);) \
      static_cast<void>(used_);                                                      \
      check::failed(__FILE__, __LINE__, text_);                                      \
    }                                                                                \
  } while (false)

int main(int argc, char** argv) {
  int failed = 0, run = 0;
  for (const check::Test& test : check::tests()) {
    if (argc > 1 && !std::strstr(test.name, argv[1])) continue;
    ++run;
    check::failures = 0;
    test.body();
    std::printf("%s %s\n", check::failures ? "FAILED" : "ok    ", test.name);
    std::fflush(stdout);
    failed += check::failures != 0;
  }
  std::printf("%d tests, %d failed\n", run, failed);
  return failed || !run ? 1 : 0;
}
