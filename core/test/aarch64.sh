#!/bin/sh
# The core's own tests on aarch64: cross-compiled here, run under qemu's user-mode emulation. It checks that the
# NEON build is right, never that it is fast. Fails, naming the packages, when a tool is missing: whether to do
# without is the caller's decision (tests/front/test_aarch64.py), not this script's.
#   core/test/aarch64.sh [part of a test's name]
set -eu

compiler=aarch64-linux-gnu-g++
emulator=qemu-aarch64

missing=
command -v "$compiler" >/dev/null || missing="$missing g++-aarch64-linux-gnu"
command -v "$emulator" >/dev/null || missing="$missing qemu-user"
if [ -n "$missing" ]; then
  echo "aarch64.sh: tools are missing; install them with: apt-get install --no-install-recommends$missing" >&2
  exit 2
fi

here=$(cd "$(dirname "$0")" && pwd)
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

# The flags of core/CMakeLists.txt, as far as they shape the arithmetic. Static: qemu then needs no foreign libraries.
flags="-O2 -static -std=c++20 -pthread -ffp-contract=fast -fno-math-errno -fno-trapping-math"

echo "aarch64.sh: compiling the core"
for source in "$here"/../*.cpp; do
  case $source in */isa_avx*) continue ;; esac
  # shellcheck disable=SC2086
  "$compiler" $flags -Wall -Wextra -c "$source" -o "$build/$(basename "$source" .cpp).o"
done
objects=$(echo "$build"/*.o)

# A forked child that starts threads of its own trips an assertion inside qemu 7.2 ("cpu == current_cpu"), whatever
# the program. Fork has nothing to do with the instruction set: those tests run natively.
echo "aarch64.sh: tests named fork_* are left to the native run, qemu-user cannot do what they do"
unset LEVELHEAD_ISA
failed=
for source in "$here"/test_*.cpp; do
  name=$(basename "$source" .cpp)
  echo "aarch64.sh: $name"
  # shellcheck disable=SC2086
  "$compiler" $flags -Wall -Wextra -I "$here/.." "$source" $objects -o "$build/$name"
  for test in $(sed -n 's/^TEST(\([a-z0-9_]*\)).*/\1/p' "$source"); do
    case $test in fork_*) continue ;; *"${1:-}"*) ;; *) continue ;; esac
    timeout 60 "$emulator" "$build/$name" "$test" >"$build/log" 2>&1 || failed="$failed $name:$test"
    cat "$build/log"
  done
done
if [ -n "$failed" ]; then
  echo "aarch64.sh: failed:$failed" >&2
  exit 1
fi
echo "aarch64.sh: everything passed"
