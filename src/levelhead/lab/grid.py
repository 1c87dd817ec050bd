"""Which trainings the claims about training need: one grid for all, so that each is done once.

The rates are those at which 1/√d_k, the rule in use, learns well; they were chosen with it alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from types import MappingProxyType

from levelhead.errors import LevelheadValueError, expected
from levelhead.lab import tasks
from levelhead.lab.claim import Params
from levelhead.lab.plan import Plan

NONE, ROOT, WHOLE = "none", "1/sqrt(d_k)", "1/d_k"

QUICK: Params = {
    "tasks": ["retrieval"],
    "d_k": [16, 256],
    "rules": [NONE, ROOT, WHOLE],
    "depths": [1],
    "seeds": 3,
    "steps": 300,
    "every": 15,
}
FULL: Params = {"tasks": ["retrieval", "text"], "depths": [1, 2, 8]}

RATES: Mapping[tuple[str, str], float] = MappingProxyType(
    {("retrieval", "adam"): 1e-3, ("retrieval", "sgd"): 0.1, ("text", "adam"): 3e-3, ("text", "sgd"): 0.1}
)


def plans(params: Params, seed: int) -> list[Plan]:
    """Every combination that the parameters name."""
    _check(params)
    axes = (params["tasks"], params["d_k"], params["depths"], params["rules"])
    return [
        Plan(
            task=task,
            examples=tasks.PLENTY[task],
            rule=rule,
            d_k=d_k,
            depth=depth,
            seed=seed + i,
            steps=params["steps"],
            every=params["every"],
            rate=RATES[task, "adam"],
        )
        for task, d_k, depth, rule in product(*axes)
        for i in range(params["seeds"])
    ]


def _check(params: Params) -> None:
    """What a comparison needs; each plan checks its own values."""
    for name in ("tasks", "d_k", "depths"):
        if not params[name]:
            raise _wrong(name, "at least one", params[name])
    if not set(params["tasks"]) <= set(tasks.TASKS):
        raise _wrong("tasks", f"of {', '.join(tasks.TASKS)}", params["tasks"])
    if not {NONE, ROOT} <= set(params["rules"]):
        raise _wrong("rules", f"{NONE} and {ROOT} at least", params["rules"])
    for name, least in (("seeds", 2), ("steps", 1)):
        if params[name] < least:
            raise _wrong(name, f"at least {least}", params[name])


def _wrong(name: str, wanted: str, given: object) -> LevelheadValueError:
    return LevelheadValueError(expected(name, wanted, repr(given), "Change the parameter"))


def core(some: Sequence[Plan]) -> list[Plan]:
    """Where a variation is tried: widest and shallowest, without scaling and with 1/√d_k."""
    d_k, depth = max(x.d_k for x in some), min(x.depth for x in some)
    return [x for x in some if (x.d_k, x.depth) == (d_k, depth) and x.rule in (NONE, ROOT)]


def with_sgd(some: Sequence[Plan]) -> list[Plan]:
    """The same plans with SGD, at its own rate."""
    return [replace(x, optimiser="sgd", rate=RATES[x.task, "sgd"]) for x in some]


def with_few(some: Sequence[Plan]) -> list[Plan]:
    """The same plans with few sequences to learn from."""
    return [replace(x, examples=tasks.FEW[x.task]) for x in some]


def at_rates(some: Sequence[Plan], factors: Sequence[float]) -> list[Plan]:
    """The same plans at multiples of their rates."""
    return [replace(x, rate=x.rate * factor) for factor in factors for x in some]


def plain(plan: Plan) -> bool:
    """Whether it is of the grid itself, none of the variations above."""
    rate, examples = RATES[plan.task, "adam"], tasks.PLENTY[plan.task]
    return (plan.optimiser, plan.rate, plan.examples) == ("adam", rate, examples)
