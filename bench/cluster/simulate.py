"""Ranks that compute and wait for each other, step by step: what a formula of means cannot show.

Each rank has its own speed at each step; a block moves when its sender has it and its receiver has room for it, and
takes `wire` seconds. Nothing is measured here, and no byte moves. With even ranks the results are those of
`scaling_model`; with stragglers they are later.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each rank was done, and how much of that it did not compute."""

    done: Seconds  # (ranks,)
    computed: Seconds  # (ranks,)

    @property
    def total(self) -> float:
        return float(self.done.max())

    @property
    def waited(self) -> Seconds:
        """Waiting for a block, or for a neighbour's."""
        return self.done - self.computed


def ring(compute: Seconds, wire: float, *, overlap: bool = True) -> Timeline:
    """Forward pass of plan "ring".

    Args:
        compute: seconds of each rank (rows) with the block of each step (columns).
        wire: seconds that a block takes to the next rank.
        overlap: whether it travels while both ends compute, or afterwards.
    """
    world, steps = compute.shape
    begin = np.zeros(world)
    for step in range(steps - 1):
        ready = begin + compute[:, step]
        sent = begin if overlap else ready
        begin = np.maximum(ready, _with_neighbours(sent) + wire)
    return Timeline(begin + compute[:, -1], compute.sum(1))


def all_gather(compute: Seconds, wire: float, begin: Seconds | None = None) -> Timeline:
    """Forward pass of plan "all-gather": pieces go round first, then all ranks compute.

    Args:
        compute: seconds of each rank, over all keys.
        wire: seconds that one rank's piece takes to the next.
        begin: when each rank arrives; None: together.
    """
    at = np.zeros(len(compute)) if begin is None else begin
    for _ in range(len(compute) - 1):
        at = _with_neighbours(at) + wire
    return Timeline(at + compute, compute)


def jitter(shape: tuple[int, ...], spread: float, seed: int = 0) -> Seconds:
    """Factors of mean 1 whose logarithms have a standard deviation of `spread`."""
    draw = np.random.default_rng(seed).standard_normal(shape)
    return np.asarray(np.exp(spread * draw - spread**2 / 2))


def straggler(world: int, factor: float) -> Seconds:
    """Factors of ranks of which one, in the middle, takes so many times as long."""
    factors = np.ones(world)
    factors[world // 2] = factor
    return factors


def _with_neighbours(times: Seconds) -> Seconds:
    """The latest of a rank, the one it receives from and the one it sends to."""
    return np.maximum(times, np.maximum(np.roll(times, 1), np.roll(times, -1)))
