"""Which plan wins, over ranks and tokens, on links of different speed: the model on paper.

A host is one rank with cores of its own, all as fast as the measured one; its link is a number. A plan that heads or
memory rule out does not take part. "alone" is one host without any plan: where it wins, spreading the sequence only
costs. A model that is off by a tenth cannot tell plans apart that are closer than that: among those, the simplest wins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cluster.load import FORWARD
from cluster.scaling_model import COMPUTING, Link, Machine, Prediction, predict
from levelhead.cluster.problem import Problem
from levelhead.cluster.traffic import STATISTICS

PLANS = ("all-gather", "ulysses", "ring")  # the simplest first
ALONE = "alone"  # no plan: one rank has everything
CLOSE = 1.1  # times the fastest: as good as it, within the error of the model
GBIT = 1e9 / 8  # bytes per second


@dataclass(frozen=True, slots=True)
class Paper:
    """The hosts and the layer that are extrapolated to."""

    cores: int = 64  # of a host
    memory: float = 64 * 2**30  # bytes of a host for one layer's attention
    latency: float = 20e-6  # seconds from host to host
    heads: int = 32
    groups: int = 8
    width: int = 128
    size: int = 2  # bytes of an element: bfloat16 on the wire, float32 in states and sums

    def problem(self, tokens: int) -> Problem:
        return Problem(tokens, self.heads, self.groups, self.width, causal=True, size=self.size)

    def link(self, gbit: float) -> Link:
        return Link(gbit * GBIT, self.latency)

    def host(self, core: Machine) -> Machine:
        """A rank of many cores: its kernel, copies and merges run on all of them, Python on one."""
        faster = {kind: core.of(kind) / self.cores for kind in (*COMPUTING, "copy", "merge")}
        return replace(core, cores=math.inf, **faster)


@dataclass(frozen=True, slots=True)
class Winner:
    """The simplest of the fastest plans of a place, and the others."""

    plan: str
    seconds: float
    every: dict[str, float]  # of those that can run
    why: str


def winner(paper: Paper, core: Machine, tokens: int, world: int, gbit: float, *, passes: str = "train") -> Winner:
    """The fastest way to attend over so many tokens on so many hosts."""
    problem, host, link = paper.problem(tokens), paper.host(core), paper.link(gbit)
    predictions: dict[str, Prediction] = {}
    if memory(ALONE, problem, 1, passes) <= paper.memory:
        predictions[ALONE] = predict("all-gather", problem, 1, host, passes=passes, split="contiguous")
    for plan in PLANS:
        divides = problem.heads % world == 0 and problem.groups % world == 0
        fits = memory(plan, problem, world, passes) <= paper.memory
        if world > 1 and fits and (divides or plan != "ulysses"):
            predictions[plan] = predict(plan, problem, world, host, link, passes=passes)
    if not predictions:
        return Winner("none", math.inf, {}, "a shard is larger than a host's memory")
    every = {plan: prediction.total for plan, prediction in predictions.items()}
    best = next(plan for plan in every if every[plan] <= CLOSE * min(every.values()))
    return Winner(best, every[best], every, _why(best, predictions))


def _why(best: str, predictions: dict[str, Prediction]) -> str:
    prediction = predictions[best]
    if best == ALONE:
        return "messages cost more than computing"
    if best == "ulysses":
        return "the fewest bytes"
    if best == "all-gather":
        return "the wire is short" if prediction.exposed < 0.2 * prediction.total else "a ring cannot hide more"
    if "all-gather" not in predictions:
        return "all keys do not fit into one host"
    return "hides the wire" if prediction.exposed < 0.5 * prediction.wire else "hides a part of the wire"


def tokens_to_hide(paper: Paper, core: Machine, gbit: float) -> float:
    """Tokens per rank from which the forward ring computes longer than a block travels.

    A balanced causal step has (n/W)²/2 pairs of every head, a block n/W tokens: the quotient grows with n/W alone, so
    this number is the same for any world.
    """
    problem, link = paper.problem(1), paper.link(gbit)
    per_token = problem.kv * problem.size / link.bandwidth
    per_pair = FORWARD * problem.width * problem.heads * paper.host(core).blocks
    # per_pair / 2 · t² = per_token · t + latency, for t > 0
    root = math.sqrt(per_token**2 + 2 * per_pair * link.latency)
    return (per_token + root) / per_pair


def memory(plan: str, problem: Problem, world: int, passes: str) -> float:
    """Bytes of a rank's arrays while a plan runs: its own shards, and what the plan needs beside them."""
    p, own = problem, problem.tokens / world
    rows = p.rows if plan == "decode" else p.rows / world
    gradients = 0 if passes == "forward" else 4
    q = rows * p.heads * p.width
    held = (2 * q + own * p.kv) * (p.size + gradients)
    if plan == ALONE:
        return held
    if plan == "all-gather":
        # Gathered parts and, from them, keys in order; then the gradients of all keys.
        return held + p.tokens * p.kv * (2 * p.size + 2 * gradients)
    if plan == "ring":
        return held + own * p.kv * (2 * p.size + 4 * gradients) + 2 * q / p.width * STATISTICS
    if plan == "decode":
        return held + world * q / p.width * (4 * p.width + STATISTICS)
    return held + 2 * held  # packed, and as heads
