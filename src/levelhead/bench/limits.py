"""The limits of this machine: FMA peak and memory bandwidth, measured, never looked up.

The shares in the report refer to them. Both run on levelhead's own threads, so other load on the machine lowers the
limits as it lowers the results.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from levelhead import _core
from levelhead.errors import bad_value

LEAST = 0.1  # seconds of work per measurement: long enough for the clock to settle
TIMES = 5  # measurements; the best one counts
ARRAY = 512 * 2**20  # bytes to read: many times what a cache holds


@dataclass(frozen=True, slots=True)
class Limits:
    gflops: float  # 10⁹ floating-point operations per second, register-only FMAs
    gbytes: float  # 10⁹ bytes read per second


def checked_threads(threads: int | None, default: int, advice: str) -> int:
    """So many threads, or the default; no more than there are CPUs."""
    available = _core.default_threads()
    if threads is not None and not 1 <= threads <= available:
        raise bad_value("threads", f"1 to {available}, the CPUs at hand", threads, advice)
    return default if threads is None else threads


def limits(threads: int, least: float = LEAST, array: int = ARRAY) -> Limits:
    return Limits(_peak(threads, least) / 1e9, _bandwidth(threads, least, array) / 1e9)


def _peak(threads: int, least: float) -> float:
    rounds, rates = 1 << 17, list[float]()
    while len(rates) < TIMES:
        begin = time.perf_counter()
        done = _core.burn(rounds, threads)
        took = time.perf_counter() - begin
        if took < least and not rates:
            rounds *= 2
        else:
            rates.append(done / took)
    return max(rates)


def _bandwidth(threads: int, least: float, array: int) -> float:
    numbers = np.ones(array // 4, np.float32)  # written: pages never touched would not be read
    best = 0.0
    for _ in range(TIMES):
        times, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < least:
            _core.sweep(numbers, threads)
            times += 1
        best = max(best, times * numbers.nbytes / (time.perf_counter() - begin))
    return best
