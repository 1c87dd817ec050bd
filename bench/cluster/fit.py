"""The model's constants from measurements: non-negative least squares of relative errors.

On one machine the wire is its memory, so every measured second is a CPU's, and the model is linear in its constants. A
link's part is never fitted: a link is known by its rate. What was held out of the fit, other worlds and other links,
shows how far the model can be trusted.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.scaling_model import KINDS, Link, Machine, amounts, predict
from levelhead.cluster.problem import Problem
from levelhead.errors import LevelheadValueError, expected


@dataclass(frozen=True, slots=True)
class Measured:
    """One cell of a result, as the model sees it."""

    plan: str
    problem: Problem
    world: int
    passes: str
    split: str
    seconds: float


def measured(run: dict[str, Any]) -> list[Measured]:
    """The cells of one run of `levelhead cluster-bench`; the median of each counts."""
    return [
        Measured(cell["plan"], Problem(**cell["problem"]), run["world"], cell["passes"], cell["split"], cell["median"])
        for cell in run["cells"]
    ]


def fit(cells: Sequence[Measured], cores: float) -> Machine:
    """The machine that explains the cells best; its ranks share so many cores."""
    if len(cells) < len(KINDS):
        advice = "Measure more cells: more plans, or another number of tokens"
        wanted = f"at least {len(KINDS)} measurements"
        raise LevelheadValueError(expected("cells", wanted, f"{len(cells)} of them", advice))
    todo = [amounts(c.plan, c.problem, c.world, c.passes, c.split, cores) for c in cells]
    matrix = np.array([[each[kind] for kind in KINDS] for each in todo])
    seconds = np.array([c.seconds for c in cells])
    constants = non_negative(matrix / seconds[:, None], np.ones(len(cells)))
    return Machine(**dict(zip(KINDS, constants.tolist(), strict=True)), cores=cores)


def non_negative(matrix: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """The x ≥ 0 for which matrix @ x is nearest to what is wanted.

    The best x has some entries at 0 and is the plain least-squares answer in the others; with a handful of columns all
    choices can be tried.
    """
    columns = matrix.shape[1]
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    best, least = np.zeros(columns), float(wanted @ wanted)
    for number in range(1, columns + 1):
        for chosen in map(list, itertools.combinations(range(columns), number)):
            x, *_ = np.linalg.lstsq(matrix[:, chosen] / scale[chosen], wanted, rcond=None)
            gap = matrix[:, chosen] / scale[chosen] @ x - wanted
            if (x >= 0).all() and gap @ gap < least:
                best, least = np.zeros(columns), float(gap @ gap)
                best[chosen] = x / scale[chosen]
    return best


@dataclass(frozen=True, slots=True)
class Errors:
    """How far predictions are from measurements, as shares of what was measured."""

    cells: int
    median: float
    largest: float
    bias: float  # mean of the logarithms' differences: above 0, the model is too slow


def errors(machine: Machine, cells: Sequence[Measured], link: Link | None = None) -> Errors:
    """Of one machine over cells that were measured on one link."""
    if not cells:
        raise LevelheadValueError(expected("cells", "at least one measurement", "none", "Measure some first"))
    ratio = np.array(
        [
            predict(c.plan, c.problem, c.world, machine, link, passes=c.passes, split=c.split).total / c.seconds
            for c in cells
        ]
    )
    off = np.abs(ratio - 1)
    bias = float(np.exp(np.log(ratio).mean()) - 1)
    return Errors(len(cells), float(np.median(off)), float(off.max()), bias)
