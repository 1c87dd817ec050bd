"""An attention problem over a sequence, and how much of it falls to each rank, in closed form.

Work is counted in visible pairs of a query and a key. Shards are taken to be even, as they are but
for a token, so that the formulas hold for thousands of ranks; a test holds them to
`levelhead.distributed.Split`, which is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SPLITS = ("contiguous", "zigzag", "striped")
PASSES = ("forward", "train")  # train: forward and backward

# Floating-point operations per pair, head and column: two products forward, five backward.
FORWARD, BACKWARD = 4, 10


@dataclass(frozen=True, slots=True)
class Problem:
    """One layer's attention over one sequence."""

    tokens: int  # keys of the whole sequence
    heads: int
    groups: int  # heads of keys and values
    width: int  # of keys and of values
    causal: bool = False
    queries: int | None = None  # that attend to all tokens; None: every token is one
    size: int = 4  # bytes of an element

    @property
    def rows(self) -> int:
        """Queries of the whole sequence."""
        return self.tokens if self.queries is None else self.queries

    @property
    def kv(self) -> int:
        """Elements of a token's keys and values."""
        return 2 * self.groups * self.width

    @property
    def pairs(self) -> float:
        """Visible pairs, of one head."""
        if self.causal and self.queries is None:
            return self.tokens * (self.tokens + 1) / 2
        return float(self.rows) * self.tokens

    def flops(self, pairs: float | NDArray[np.float64], per_pair: int) -> NDArray[np.float64]:
        """Operations of so many pairs of every head; `per_pair` is FORWARD or BACKWARD."""
        return np.asarray(per_pair * self.width * self.heads * pairs, np.float64)


@dataclass(frozen=True, slots=True)
class Load:
    """Pairs of one head that a rank meets with the keys of each other rank, in the order in which
    a ring brings them: its own first. All keys at once are the sum over the steps."""

    busiest: NDArray[np.float64]  # (steps,) of the rank that everybody waits for
    mean: NDArray[np.float64]  # over ranks

    @property
    def imbalance(self) -> float:
        """The busiest rank's work over that of an even share."""
        return float(self.busiest.sum() / self.mean.sum())


def load(problem: Problem, split: str, world: int) -> Load:
    """Who computes how much. Queries that everybody has (decode) meet one shard of keys, once.

    Causal and contiguous, rank r sees its own block half and r blocks whole: the last rank works
    (2·world − 1) / world times as much as the mean. Zig-zag and striped shards see half of
    every block, whoever they are: at each step of a ring the ranks are even.
    """
    if problem.queries is not None:
        share = np.array([problem.pairs / world])
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
    even = np.full(world, problem.pairs / world**2)
    return Load(even, even)
