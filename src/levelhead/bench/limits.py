"""The limits of this machine: FMA peak and memory bandwidth, measured, never looked up.

The shares in the report refer to them. Both run on levelhead's own threads, so other load on the machine lowers the
limits as it lowers the results.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from levelhead import _core

LEAST = 0.1  # seconds of work per measurement: long enough for the clock to settle
TIMES = 5  # measurements; the best one counts
ARRAY = 512 * 2**20  # bytes to read: many times what a cache holds


@dataclass(frozen=True, slots=True)
class Limits:
    gflops: float  # 10⁹ floating-point operations per second, register-only FMAs
    gbytes: float  # 10⁹ bytes read per second


def limits(threads: int, least: float = LEAST, array: int = ARRAY) -> Limits:
    return Limits(_peak(threads, least) / 1e9, _bandwidth(threads, least, array) / 1e9)


def _peak(threads: int, least: float) -> float:
    rounds, took, done = 1 << 16, 0.0, 0
    while took < least:
        rounds *= 2
        begin = time.perf_counter()
        done = _core.burn(rounds, threads)
        took = time.perf_counter() - begin
    best = done / took
    for _ in range(TIMES - 1):
        begin = time.perf_counter()
        done = _core.burn(rounds, threads)
        best = max(best, done / (time.perf_counter() - begin))
    return best


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
