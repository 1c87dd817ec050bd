"""What NumPy's core says about itself and the machine: its one instruction set, its threads, and two speeds.

NumPy and its BLAS choose instructions and threads of their own, inside of an operation; `threads` here are how many
parts of a call are computed at the same time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from levelhead.errors import LevelheadValueError

ISA = "numpy"

_NUMBERS, _PER_ROUND = 2**17, 24  # what `burn` works on stays in a core's second cache


def info() -> dict[str, Any]:
    check_isa()
    return {"isa": ISA, "available": [ISA], "built": [ISA], "threads": default_threads()}


def set_isa(name: str) -> str:
    _refuse("isa", name)
    return ISA


def check_isa() -> None:
    """LEVELHEAD_ISA must name what is there."""
    if name := os.environ.get("LEVELHEAD_ISA"):
        _refuse("LEVELHEAD_ISA", name)


def _refuse(source: str, name: str) -> None:
    if name != ISA:
        raise LevelheadValueError(f"{source}: expected one of {ISA} (what the pure wheel has), got {name!r}")


def default_threads() -> int:
    """The CPUs that this process may use, at most LEVELHEAD_NUM_THREADS."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = os.environ.get("LEVELHEAD_NUM_THREADS", "")
    if not (limit.isascii() and limit.isdecimal()):
        return cpus
    return int(min(cpus, float(limit))) or cpus  # int() of the text refuses 4301 digits


def burn(rounds: int, threads: int) -> int:
    """Multiplies and adds on each thread, about as many as the kernels do in so many rounds; the operations done."""
    passes = -(-rounds * _PER_ROUND // _NUMBERS)

    def work(_: int) -> int:
        x = np.full(_NUMBERS, 2, np.float32)
        for _ in range(passes):
            np.multiply(x, np.float32(0.999), out=x)
            np.add(x, np.float32(0.001), out=x)
        return 2 * _NUMBERS * passes

    return sum(_on_threads(work, range(threads), threads))


def sweep(array: Any, piece: int, threads: int) -> float:
    """The sum of an array of floats, each read once, by threads that take `piece` neighbours at a time."""
    numbers = np.asarray(array).ravel()
    parts = range(0, numbers.size, piece)
    return float(sum(_on_threads(lambda at: float(numbers[at : at + piece].sum()), parts, threads)))


def _on_threads(work: Callable[[int], Any], parts: range, threads: int) -> list[Any]:
    with ThreadPoolExecutor(max(threads, 1)) as pool:
        return list(pool.map(work, parts))
