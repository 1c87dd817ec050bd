"""Time in round-robin bursts, and error against the truth.

Implementations take turns in bursts: idle, warm-ups, timed calls, next. Plain interleaving would be unfair: a pool that
still spins, caches and clocks that the last call left behind would slow the next one.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

IDLE = 0.050  # seconds in which the threads of the call before go to sleep
WARM, CALLS = 2, 10
LONG = 0.3  # seconds; longer calls are warmed once and timed less often
COLD = 0.02  # seconds; what a first call takes longer than that, every call takes, roughly
SAMPLE = 2e-4  # seconds; shorter calls are timed in batches, or the clock would show
SLOWER = 3.0  # times the fastest: cannot become the fastest, one short burst is enough
HOPELESS = 5.0  # seconds; a call that takes longer, and is that much slower, is not repeated


@dataclass(frozen=True, slots=True)
class Plan:
    """How often one implementation is called."""

    rounds: int
    warm: int
    calls: int
    batch: int = 1  # calls per sample

    def seconds(self, call: float) -> float:
        """What it will take, at so many seconds a call."""
        return self.rounds * (IDLE + (self.warm + self.calls * self.batch) * call)


@dataclass(frozen=True, slots=True)
class Timing:
    samples: tuple[float, ...]  # seconds per call
    calls_per_sample: int

    @property
    def best(self) -> float:
        return min(self.samples)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)


def estimate(run: Callable[[], Any], fastest: float = float("inf")) -> float:
    """Seconds that a call takes once it is warm, roughly; the first call counts little.

    It picks among variants and finds those that are far behind, so short calls are repeated a dozen times, unless they
    are far behind the fastest already.
    """
    took = timed(run)
    if took > COLD and took > 2 * SLOWER * fastest:
        return took
    if took > LONG:
        return took if took > HOPELESS else min(took, timed(run))
    end = time.perf_counter() + LONG / 4
    for number in range(CALLS + WARM):
        if number >= WARM and time.perf_counter() > end:
            break
        took = min(took, timed(run))
    return took


def plan(call: float, fastest: float, *, rounds: int, long: float = LONG) -> Plan:
    """A plan for a call that takes `call` seconds, when the fastest takes `fastest`."""
    if call > SLOWER * fastest:
        if call > HOPELESS:
            return Plan(rounds=1, warm=0, calls=1)
        return Plan(1, 1, 1) if call > long else Plan(1, 1, 3, batch(call))
    if call > long:
        calls = max(1, round(CALLS * long / call))
        return Plan(min(rounds, 2) if call > HOPELESS else rounds, int(call < HOPELESS), calls)
    # Short calls are cheap to repeat and the most easily disturbed.
    more = 2 if call * (WARM + CALLS) < IDLE else 1
    return Plan(rounds * more, WARM, CALLS, batch(call))


def bursts(
    runs: Mapping[str, Callable[[], Any]], plans: Mapping[str, Plan], tell: Callable[[str], None] = lambda _: None
) -> dict[str, Timing]:
    """Times everything in `runs`, in turns; `tell` is called with the name whose burst begins."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    with _no_collection():
        for turn in range(max((plan.rounds for plan in plans.values()), default=0)):
            for name, run in runs.items():
                if turn >= plans[name].rounds:
                    continue
                tell(name)
                time.sleep(IDLE)
                samples[name] += _burst(run, plans[name])
    return {name: Timing(tuple(taken), plans[name].batch) for name, taken in samples.items()}


def _burst(run: Callable[[], Any], plan: Plan) -> list[float]:
    for _ in range(plan.warm):
        run()
    taken = []
    for _ in range(plan.calls):
        begin = time.perf_counter()
        for _ in range(plan.batch):
            run()
        taken.append((time.perf_counter() - begin) / plan.batch)
    return taken


def batch(call: float) -> int:
    return max(1, int(SAMPLE / max(call, 1e-8)))


def timed(run: Callable[[], Any]) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python's collector would run inside a burst."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# ---- error ------------------------------------------------------------------

# Relative RMS error above which an answer is wrong rather than rounded: ten times what arithmetic in that type costs,
# and far below what a forgotten mask or scale costs. A peer that computes float16 in bfloat16 is caught too.
TOLERANCE = {"float32": 1e-4, "float16": 1.5e-3, "bfloat16": 3e-2}
MODEL_TOLERANCE = 1e-3  # of float32 through thirty layers, whose errors add up


@dataclass(frozen=True, slots=True)
class Error:
    """Distance from the truth, in the units of the output."""

    rms: float
    max: float
    relative: float  # rms over the rms of the truth


Errors: TypeAlias = dict[str, Error]  # by part of the answer


def error(result: NDArray[Any], truth: NDArray[Any]) -> Error:
    gap = np.asarray(result, np.float64) - truth
    rms, size = (float(np.sqrt(np.mean(x**2))) for x in (gap, truth))
    return Error(rms, float(np.abs(gap).max()), rms / size if size else rms)


def errors(result: Mapping[str, NDArray[Any]], truth: Mapping[str, NDArray[Any]]) -> Errors:
    """Part by part; nothing of the truth may be missing."""
    return {name: error(result[name], part) for name, part in truth.items()}


def overall(parts: Errors) -> Error:
    """One number for an answer of several parts; relative is that of the worst, which a part that is small beside the
    others could not show otherwise."""
    return replace(joined([*parts.values()]), relative=max(e.relative for e in parts.values()))


def joined(errors: list[Error]) -> Error:
    """Over several seeds: the RMS of all, the maximum of all."""
    rms = float(np.sqrt(np.mean([e.rms**2 for e in errors])))
    relative = float(np.sqrt(np.mean([e.relative**2 for e in errors])))
    return Error(rms, max(e.max for e in errors), relative)
