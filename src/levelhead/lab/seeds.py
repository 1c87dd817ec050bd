"""Comparisons of trainings, seed by seed: estimates with 95 % intervals over the seeds.

Trainings with the same seed begin with the same weights and see the same sequences, so a measure under one rule is
divided by the same measure under another, seed by seed. Nothing here trains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from levelhead.lab.claim import Outcome, UndecidedError, Verdict
from levelhead.lab.grid import NONE, ROOT
from levelhead.lab.plan import Curves, Plan

# Student's t for n - 1 = 1, 2, …: a mean of n seeds lies so many of its standard errors around the true one in 95 of
# 100 cases. With more seeds than are listed, the last is a little too careful.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Training:
    """A plan and the curves of its training."""

    plan: Plan
    curves: Curves


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, its standard error, and its 95 % interval."""

    value: float
    stderr: float
    low: float
    high: float

    def exp(self) -> Estimate:
        """Of a mean of logarithms, the geometric mean."""
        value = math.exp(self.value)
        return Estimate(value, value * self.stderr, math.exp(self.low), math.exp(self.high))


def estimate(values: Sequence[float]) -> Estimate:
    """Of independent values, one for each seed."""
    n = len(values)
    if n < 2:
        raise UndecidedError("a single seed has no error: at least two are needed")
    if not np.isfinite(values).all():
        raise UndecidedError("a training left the finite numbers, and a mean with it")
    mean, stderr = float(np.mean(values)), float(np.std(values, ddof=1) / math.sqrt(n))
    reach = _T95[min(n - 1, len(_T95)) - 1] * stderr
    return Estimate(mean, stderr, mean - reach, mean + reach)


def ratio(runs: Sequence[Training], measure: Callable[[Training], float]) -> Estimate:
    """A measure without scaling over the same with 1/√d_k; geometric means."""
    differences = by_seed(runs, lambda run, twin: _log(measure(run)) - _log(measure(twin)))
    return estimate(list(differences.values())).exp()


def by_seed(runs: Sequence[Training], differ: Callable[[Training, Training], float]) -> dict[int, float]:
    """How a run without scaling differs from its twin with 1/√d_k, which shares all else.

    Within a seed it is the mean over tasks, widths and depths; the seeds are what errors come from.
    """
    twins = {run.plan: run for run in where(runs, rule=ROOT)}
    differences: dict[int, list[float]] = {}
    for run in where(runs, rule=NONE):
        difference = differ(run, twins[replace(run.plan, rule=ROOT)])
        differences.setdefault(run.plan.seed, []).append(difference)
    return {seed: float(np.mean(each)) for seed, each in differences.items()}


def outcome(named: Mapping[str, Estimate], verdict: Verdict, theory: Any, **details: Any) -> Outcome:
    """The outcome of a claim: every estimate by its name, its 95 % interval among the details."""
    return Outcome(
        theory=theory,
        measured={name: x.value for name, x in named.items()},
        stderr={name: x.stderr for name, x in named.items()},
        verdict=verdict,
        details={"intervals": {name: [x.low, x.high] for name, x in named.items()}, **details},
    )


def curve_of(estimates: Mapping[int, Estimate]) -> dict[str, list[float]]:
    """Estimates over x, for a plot."""
    y, stderr = ([getattr(one, name) for one in estimates.values()] for name in ("value", "stderr"))
    return {"x": [float(x) for x in estimates], "y": y, "stderr": stderr}


def _log(x: float) -> float:
    return math.log(x) if x > 0 else math.nan


def where(runs: Sequence[Training], **wanted: Any) -> list[Training]:
    """Those whose plan has these values."""
    return [run for run in runs if all(getattr(run.plan, name) == x for name, x in wanted.items())]


def reaches(curves: Curves, bound: float) -> float | None:
    """The step at which the training loss first falls to a bound, between marks; None: never."""
    before = None
    for step, loss in zip(curves.step, curves.loss, strict=True):
        if loss <= bound:
            if before is None or not before[1] > loss:
                return float(step)
            share = (before[1] - bound) / (before[1] - loss)
            return before[0] + share * (step - before[0])
        before = (step, loss)
    return None


def learning(curves: Curves, bound: float) -> slice:
    """The marks until the loss is below a bound: there is something left to learn."""
    below = [i for i, loss in enumerate(curves.loss) if loss < bound]
    return slice(0, max(below[0], 1) if below else len(curves.loss))


def geometric_mean(values: Sequence[float]) -> float:
    with np.errstate(divide="ignore"):
        return float(np.exp(np.mean(np.log(values))))
