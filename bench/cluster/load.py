"""How much of an attention problem falls to each rank, in closed form.

Work is counted in visible pairs of a query and a key. Shards are taken to be even, as they are but for a token, so that
the formulas hold for thousands of ranks; a test compares them with `levelhead.distributed.Split`, which is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from levelhead.cluster.problem import Problem

# Floating-point operations per pair, head and column: two products forward, five backward.
FORWARD, BACKWARD = 4, 10


def pairs(problem: Problem) -> float:
    """Visible pairs, of one head."""
    if problem.causal and problem.queries is None:
        return problem.tokens * (problem.tokens + 1) / 2
    return float(problem.rows) * problem.tokens


def flops(problem: Problem, pairs: float | NDArray[np.float64], per_pair: int) -> NDArray[np.float64]:
    """Operations of so many pairs of every head; `per_pair` is FORWARD or BACKWARD."""
    return np.asarray(per_pair * problem.width * problem.heads * pairs, np.float64)


@dataclass(frozen=True, slots=True)
class Load:
    """Pairs of one head that a rank computes with the keys of each other rank, in the order of a ring: its own first.
    All keys at once are the sum over the steps."""

    busiest: NDArray[np.float64]  # (steps,) of the rank that all others wait for
    mean: NDArray[np.float64]  # over ranks

    @property
    def imbalance(self) -> float:
        """The busiest rank's work over that of an even share."""
        return float(self.busiest.sum() / self.mean.sum())


def load(problem: Problem, split: str, world: int) -> Load:
    """The work of each rank. Queries that all ranks have (decode) attend to one shard of keys, once.

    Causal and contiguous, rank r sees its own block half and r blocks whole: the last rank works (2·world − 1) / world
    times as much as the mean. Zig-zag and striped shards see half of every block on every rank: at each step of a ring
    the ranks are even.
    """
    if problem.queries is not None:
        share = np.array([pairs(problem) / world])
        return Load(share, share)
    block = (problem.tokens / world) ** 2
    whole = np.full(world, block)
    if not problem.causal:
        return Load(whole, whole)
    half = (block + problem.tokens / world) / 2
    if split == "contiguous":
        whole[0] = half
        step = np.arange(world)
        return Load(whole, np.where(step > 0, block * (world - step) / world, half))
    even = np.full(world, pairs(problem) / world**2)
    return Load(even, even)
