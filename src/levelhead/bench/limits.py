"""The limits of this machine: FMA peak and memory bandwidth, measured, never looked up.

The shares in the report refer to them. Both run on levelhead's own threads, so other load on the machine lowers the
limits as it lowers the results. They are measured as cells are: the shortest of many single calls counts. A mean over a
window would be lower, and cells would exceed their limit. A cell's own limit takes turns with the implementations: the
clock follows what a machine has been doing, and a peak measured at another minute would be another one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from levelhead import _core
from levelhead.bench.measure import timed
from levelhead.errors import bad_value

LEAST = 0.1  # seconds of work per measurement of the peak: long enough for the clock to settle
TIMES = 5  # measurements of the peak; the best one counts
SWEEPS = 30  # single sweeps per pattern; the shortest one counts
ARRAY = 512 * 2**20  # bytes to read: many times what a cache holds
PIECE = 2**18  # numbers: a megabyte, large for the prefetcher, small for an even distribution


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
    return Limits(_peak(threads, least) / 1e9, bandwidth(threads, array) / 1e9)


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


@dataclass(frozen=True, slots=True)
class Limit:
    """What is timed beside a cell, and how much work one call of it is."""

    field: str  # of the cell: its limit in 10⁹ units per second
    units: float
    run: Callable[[], object]


def beside(threads: int, seconds: float, array: int, *, memory: bool) -> dict[str, Limit]:
    """The limit of a cell whose calls take so long and read so many bytes. What fits into a cache is read faster, so
    the array has the cell's size. Memory is read in two patterns: pieces in turn, and one range per thread."""
    if memory:
        numbers = np.ones(max(array // 4, threads), np.float32)  # written: pages never touched would not be read
        patterns = {"memory in pieces": PIECE, "memory in ranges": -(-numbers.size // threads)}
        return {
            name: Limit("gbytes_limit", numbers.nbytes, partial(_core.sweep, numbers, piece, threads))
            for name, piece in patterns.items()
        }
    rounds = 1 << 10
    while timed(partial(_core.burn, rounds, threads)) < min(seconds, LEAST) / 2:
        rounds *= 2
    run = partial(_core.burn, rounds, threads)
    return {"FMA peak": Limit("gflops_limit", run(), run)}


def bandwidth(threads: int, array: int) -> float:
    """Bytes per second that can be read of an array of so many bytes."""
    patterns = beside(threads, 0, array, memory=True).values()
    return max(limit.units / min(timed(limit.run) for _ in range(SWEEPS)) for limit in patterns)
