"""Which trainings the claims about training need: one grid for all, so that each is done once.

The rates are those at which 1/√d_k, the rule in use, learns well; they were chosen with it alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from types import MappingProxyType

from levelhead.errors import bad_value
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
    steps, every = params["steps"], params["every"]
    seeds = range(seed, seed + params["seeds"])
    return [
        Plan(task, tasks.PLENTY[task], rule, d_k, depth, one_seed, steps, every, RATES[task, "adam"])
        for task, d_k, depth, rule in product(params["tasks"], params["d_k"], params["depths"], params["rules"])
        for one_seed in seeds
    ]


def _check(params: Params) -> None:
    """Refuses parameters that allow no comparison; each plan checks its own values."""
    conditions = [
        *((name, bool(params[name]), "at least one") for name in ("tasks", "d_k", "depths")),
        ("tasks", set(params["tasks"]) <= set(tasks.TASKS), f"of {', '.join(tasks.TASKS)}"),
        ("rules", {NONE, ROOT} <= set(params["rules"]), f"{NONE} and {ROOT} at least"),
        *((name, params[name] >= least, f"at least {least}") for name, least in (("seeds", 2), ("steps", 1))),
    ]
    for name, holds, wanted in conditions:
        if not holds:
            raise bad_value(name, wanted, repr(params[name]), "Change the parameter")


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
