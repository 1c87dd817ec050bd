"""Which trainings the claims about training need: one grid for all, so that each is done once.

The rates are those at which 1/√d_k, the rule in use, learns well; they were chosen with it alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from types import MappingProxyType

from levelhead.lab.claim import Params
from levelhead.lab.plan import Plan

__all__ = ["FULL", "NONE", "QUICK", "ROOT", "WHOLE", "optimised", "paced", "plans"]

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

RATES: Mapping[tuple[str, str], float] = MappingProxyType(
    {
        ("retrieval", "adam"): 1e-3,
        ("retrieval", "sgd"): 0.1,
        ("text", "adam"): 3e-3,
        ("text", "sgd"): 0.1,
    }
)


def plans(params: Params, seed: int) -> list[Plan]:
    """Every combination that the parameters name."""
    axes = (params["tasks"], params["d_k"], params["depths"], params["rules"])
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
        for task, d_k, depth, rule in product(*axes)
        for i in range(params["seeds"])
    ]


def optimised(some: Sequence[Plan], optimiser: str) -> list[Plan]:
    """The same plans with another optimiser, at its own rate."""
    return [replace(x, optimiser=optimiser, rate=RATES[x.task, optimiser]) for x in some]


def paced(some: Sequence[Plan], factor: float) -> list[Plan]:
    """The same plans at another rate."""
    return [replace(x, rate=x.rate * factor) for x in some]
