"""Which trainings the claims about training need: the same for all four, so that each is done once.

Also how two rules are compared: pair by pair, since runs with the same seed begin with the same
weights and meet the same sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import Any

import numpy as np

from levelhead.lab.claim import Params, UndecidedError
from levelhead.lab.trained import Run
from levelhead.lab.training import Curves, Plan

__all__ = ["FULL", "QUICK", "RATES", "Estimate", "compared", "estimate", "plans", "reaches"]

NONE, ROOT, WHOLE = "none", "1/sqrt(d_k)", "1/d_k"

QUICK: Params = MappingProxyType(
    {
        "tasks": ["retrieval"],
        "d_k": [16, 256],
        "rules": [NONE, ROOT, WHOLE],
        "depths": [1],
        "seeds": 3,
        "steps": 300,
        "every": 15,
    }
)
FULL: Params = MappingProxyType({"tasks": ["retrieval", "text"], "depths": [1, 2, 4, 8]})

# Rates at which 1/√d_k learns well; the claims that could depend on them try others.
RATES: Mapping[tuple[str, str], float] = MappingProxyType(
    {("retrieval", "adam"): 1e-3, ("retrieval", "sgd"): 0.1, ("text", "adam"): 3e-3}
)


def plans(params: Params, seed: int) -> list[Plan]:
    """Every combination that the parameters name."""
    axes = (params["tasks"], params["rules"], params["d_k"], params["depths"])
    return [
        Plan(
            task=task,
            rule=rule,
            d_k=d_k,
            depth=depth,
            seed=seed + i,
            steps=params["steps"],
            every=params["every"],
            rate=RATES[task, "adam"],
        )
        for task, rule, d_k, depth in product(*axes)
        for i in range(params["seeds"])
    ]


# ---- errors

# Student's t: 95 % of a mean of n seeds lie within so many standard errors, n - 1 = 1, 2, …; with
# more seeds than are listed the last is a little too careful.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, its standard error, and where the true one lies with 95 %."""

    value: float
    stderr: float
    low: float
    high: float


def estimate(values: Sequence[float]) -> Estimate:
    """Of independent values, one a seed."""
    n = len(values)
    if n < 2:
        raise UndecidedError("one seed has no error: at least two are needed")
    if not np.isfinite(values).all():
        raise UndecidedError("a training left the finite numbers, so its mean says nothing")
    mean, stderr = float(np.mean(values)), float(np.std(values, ddof=1) / math.sqrt(n))
    reach = _T95[min(n - 1, len(_T95)) - 1] * stderr
    return Estimate(mean, stderr, mean - reach, mean + reach)


def compared(
    runs: Sequence[Run], measure: Callable[[Run], float], *, rule: str = NONE, with_rule: str = ROOT
) -> Estimate:
    """The ratio of a measure under two rules, everything else equal.

    Geometric mean over tasks, widths and depths first, then over seeds, whose spread is the error.
    """
    found = {run.plan: measure(run) for run in runs if run.plan.rule in (rule, with_rule)}
    by_seed: dict[int, list[float]] = {}
    for plan, value in found.items():
        if plan.rule == rule:
            other = found[replace(plan, rule=with_rule)]
            by_seed.setdefault(plan.seed, []).append(math.log(value / other))
    logs = estimate([float(np.mean(values)) for values in by_seed.values()])
    ratio = math.exp(logs.value)
    return Estimate(ratio, ratio * logs.stderr, math.exp(logs.low), math.exp(logs.high))


# ---- what is read off curves


def reaches(curves: Curves, bound: float) -> float | None:
    """The step at which the training loss first falls below a bound, between marks; None: never."""
    step, loss = curves.step, curves.loss
    for i, value in enumerate(loss):
        if value < bound:
            if i == 0:
                return float(step[0])
            share = (loss[i - 1] - bound) / (loss[i - 1] - value)
            return step[i - 1] + share * (step[i] - step[i - 1])
    return None


def widest(runs: Sequence[Run]) -> list[Run]:
    """Those with the largest d_k, where scaling matters most."""
    d_k = max(run.plan.d_k for run in runs)
    return [run for run in runs if run.plan.d_k == d_k]


def told(estimate: Estimate) -> dict[str, Any]:
    """As JSON."""
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}
