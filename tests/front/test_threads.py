"""Threads: how many there are, several callers at once, and other load on the same cores.

Results must not depend on any of it. The time limits are loose bounds that only a severe slowdown breaks, not
measurements. Signals and forks: test_process.py.
"""

from __future__ import annotations

import os
import sys

import pytest

from processes import PRELUDE, fresh, output_of, start

# ---- several callers at once ------------------------------------------------


def test_python_threads_get_the_bits_of_a_serial_run() -> None:
    fresh("""
def problem(i):
    x = numbers(1 + i % 3, 2, 64 * i + 5, 16 + 8 * (i % 4), seed=i)
    options = [{}, dict(causal=True), dict(dropout=0.3, seed=i), dict(window=(9, 9), alibi=True)]
    if i % 2:
        return lh.attention(x, x, x, **options[i % 4]).tobytes()
    seen = lh.observe(x, x, x, **options[i % 4])
    return seen.output.tobytes() + seen.logsumexp.tobytes() + seen.rows.entropy.tobytes()

serial = [problem(i) for i in range(10)]
wrong, start = [], threading.Barrier(8)
def caller(first):
    start.wait()
    for n in range(20):
        i = (first + 3 * n) % 10
        if problem(i) != serial[i]:
            wrong.append((first, i))
callers = [threading.Thread(target=caller, args=(first,)) for first in range(8)]
for thread in callers:
    thread.start()
for thread in callers:
    thread.join()
assert not wrong, wrong
""")


def test_other_python_threads_run_during_a_call() -> None:
    # If a call held the GIL, this loop would run only at its beginning and its end.
    fresh("""
x = repeated(16, 4096, 64)
for threads in (1, None):
    worker = threading.Thread(target=lh.attention, args=(x, x, x), kwargs=dict(threads=threads))
    turns, began = 0, time.monotonic()
    worker.start()
    while worker.is_alive():
        turns += 1
        time.sleep(0.001)
    seconds = time.monotonic() - began
    assert seconds > 0.1, f"too short to tell: {seconds} s"
    assert turns > 50 * seconds, f"{turns} turns in {seconds} s"
""")


def test_first_calls_of_many_threads_at_once() -> None:
    # Nothing has run in this process: the choice of ISA, the pool and the workspace are initialised here.
    code = """
import threading
import numpy as np
import levelhead as lh
x = np.random.default_rng(0).standard_normal((4, 500, 32)).astype("f")
start, results = threading.Barrier(8), []
def caller():
    start.wait()
    results.append(lh.attention(x, x, x, threads=3).tobytes())
callers = [threading.Thread(target=caller) for _ in range(8)]
for thread in callers:
    thread.start()
for thread in callers:
    thread.join()
assert len(results) == 8 and set(results) == {lh.attention(x, x, x, threads=1).tobytes()}
"""
    for _ in range(5):
        output_of(start([sys.executable, "-c", code]), 60)


# ---- neighbours -------------------------------------------------------------


def test_two_processes_at_once_both_get_on() -> None:
    # Long calls, then many short ones with more threads than cores, where spinning would cost most.
    code = """
x, y = numbers(1, 2048, 64), numbers(8, 200, 32)
began = time.monotonic()
lh.attention(x, x, x)
heads = 1 + int(0.5 / (time.monotonic() - began))  # about half a second of work when alone
if len(sys.argv) > 1:
    heads = int(sys.argv[1])
x = np.broadcast_to(x, (heads, 2048, 64))
began = time.monotonic()
lh.attention(x, x, x)
for _ in range(300):
    lh.attention(y, y, y, threads=4)
print(heads, time.monotonic() - began)
check()
"""
    heads, alone = fresh(code).split()
    pair = [start([sys.executable, "-c", PRELUDE + code, heads]) for _ in range(2)]
    together = [float(output_of(process, 240).split()[1]) for process in pair]
    assert max(together) < 10 * max(float(alone), 0.5), f"alone {alone} s, together {together} s"


def test_far_more_threads_than_cores() -> None:
    fresh("""
x = numbers(4, 1000, 32)
alone = lh.attention(x, x, x, threads=1)
for threads in (2, 3, 7, 64, 10_000):
    assert lh.attention(x, x, x, threads=threads).tobytes() == alone.tobytes(), threads
""")


def test_an_idle_process_uses_no_cpu() -> None:
    code = """
x = numbers(4, 600, 32)
for threads in (None, 2, 8):
    for _ in range(3):
        lh.attention(x, x, x, threads=threads)
    time.sleep(0.05)
    before = time.process_time()  # of all threads
    time.sleep(0.5)
    print(time.process_time() - before)
"""
    assert max(map(float, fresh(code).split())) < 0.1


# ---- how many ---------------------------------------------------------------

COUNT = """
import os, sys
import numpy as np

def count():
    return len(os.listdir("/proc/self/task"))

x = np.ones((8, 1000, 32), np.float32)  # enough for a crowd
np.matmul(x, np.swapaxes(x, 1, 2))  # NumPy's own threads are there from now on
before = count()
import levelhead as lh
assert count() == before, "importing starts threads"

def started(**options):
    lh.attention(x, x, x, **options)
    return count() - before
"""


def counted(code: str, **changes: str | None) -> list[int]:
    process = start([sys.executable, "-c", COUNT + code], **changes)
    return [int(word) for word in output_of(process, 240).split()]


@pytest.fixture(scope="module")
def free() -> int:
    """How many threads a process without limits would use."""
    return counted("print(lh.info().threads)", LEVELHEAD_NUM_THREADS=None)[0]


def test_as_many_as_the_machine_allows_and_not_before_they_are_needed() -> None:
    code = """
small = np.ones((1, 4, 8), np.float32)
lh.attention(small, small, small)
print(lh.info().threads, count() - before, started(), started())
"""
    threads, small, first, second = counted(code, LEVELHEAD_NUM_THREADS=None)
    assert 1 <= threads <= len(os.sched_getaffinity(0))  # a cgroup may allow fewer
    assert (small, first, second) == (0, threads - 1, threads - 1)


@pytest.mark.parametrize("wanted", [1, 2, 1000])
def test_the_variable_is_an_upper_limit(wanted: int, free: int) -> None:
    code = """
assert any("LEVELHEAD_NUM_THREADS" in reason for reason in lh.info().off)
print(lh.info().threads, started())
"""
    limit = min(wanted, free)
    assert counted(code, LEVELHEAD_NUM_THREADS=str(wanted)) == [limit, limit - 1]


@pytest.mark.parametrize("nonsense", ["", "0", "-2", "many", "1.5", " 1", "+1"])
def test_a_variable_that_is_no_count_does_not_limit(nonsense: str, free: int) -> None:
    code = """
said = [reason for reason in lh.info().off if "LEVELHEAD_NUM_THREADS" in reason]
print(lh.info().threads, len(said), int(all("ignored" in reason for reason in said)))
"""
    assert counted(code, LEVELHEAD_NUM_THREADS=nonsense) == [free, bool(nonsense), True]


def test_a_count_of_any_length_is_a_limit(free: int) -> None:
    assert counted("print(lh.info().threads)", LEVELHEAD_NUM_THREADS="9" * 5000) == [free]


def test_affinity_is_an_upper_limit_that_may_change(free: int) -> None:
    code = """
everything = os.sched_getaffinity(0)
os.sched_setaffinity(0, {min(everything)})
print(lh.info().threads, started())
os.sched_setaffinity(0, everything)
print(lh.info().threads, started())
"""
    assert counted(code, LEVELHEAD_NUM_THREADS=None) == [1, 0, free, free - 1]


def test_an_explicit_number_is_taken_at_its_word() -> None:
    code = "print(started(threads=1), started(threads=4), started(threads=3), started())"
    assert counted(code, LEVELHEAD_NUM_THREADS="1") == [0, 3, 3, 3]  # and none is ever joined


def test_tensors_follow_torch() -> None:
    # Counted with torch's own threads out of the way: it starts none for from_numpy.
    code = """
import torch
x = torch.from_numpy(x)
before = count()
for threads in (1, 4):
    torch.set_num_threads(threads)
    print(started())
"""
    assert counted(code, LEVELHEAD_NUM_THREADS="2") == [0, 3]
