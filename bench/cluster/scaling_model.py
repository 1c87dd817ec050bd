"""What a distributed call costs: a formula with nine constants of the machine and two of the link.

    t = flops / rate + read / reading + written / writing                           (a CPU's part)
      + copied / copy + merged / merge + message · messages + call                      (the same)
      + bytes / bandwidth + latency · messages                      (the wire's part, if not hidden)

Reading keys and writing their gradients shows where few rows use them: in plan decode. Where rows are many it is a
part of the kernel's rate. The busiest rank counts: a causal split that is not even makes the others wait. In a ring the
wire works behind the kernel: a step shows only what the wire takes longer than the computation. The CPU's part of a
transfer (copies, system calls) is never hidden, because the kernel wants that CPU.

This is a model. It has no congestion, no jitter and no topology beyond `Link.bisection`; `simulate` adds stragglers,
`fit` finds the constants, and docs/scaling.md shows how far it is off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.load import BACKWARD, FORWARD, Load, flops, load
from levelhead.cluster.problem import Problem
from levelhead.cluster.traffic import STATISTICS, Traffic, traffic

# What a second of CPU is spent on; the unit of each.
COMPUTING = ("forward", "blocks", "backward", "read", "written")
KINDS = (*COMPUTING, "copy", "merge", "message", "call")


@dataclass(frozen=True, slots=True)
class Machine:
    """Seconds that a rank's CPU takes for one of each thing."""

    forward: float  # operation of a kernel that sees all its keys at once
    blocks: float  # operation of a kernel whose states are merged later: ring, decode
    backward: float
    read: float  # byte of keys and values that few rows use
    written: float  # byte of their gradients
    copy: float  # byte received: packing, system calls, putting in place
    merge: float  # byte of partial states and sums
    message: float
    call: float  # pass through a plan: checks and Python
    cores: float = math.inf  # that all ranks share with each other; inf: each rank has its own

    def of(self, kind: str) -> float:
        seconds: float = getattr(self, kind)
        return seconds


@dataclass(frozen=True, slots=True)
class Link:
    """Every rank's way to the others, full duplex."""

    bandwidth: float = math.inf  # bytes per second
    latency: float = 0.0  # seconds
    bisection: float = 1.0  # share of the bandwidth left when all ranks send to all ranks


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of one call."""

    cpu: dict[str, float]  # by kind
    wire: float  # bytes and latency on the link, hidden or not
    exposed: float  # what of it no computation hides

    @property
    def compute(self) -> float:
        return sum(self.cpu[kind] for kind in COMPUTING)

    @property
    def total(self) -> float:
        return sum(self.cpu.values()) + self.exposed


def amounts(
    plan: str, problem: Problem, world: int, passes: str, split: str, cores: float = math.inf
) -> dict[str, float]:
    """How much of each kind the slowest rank has to do, or waits for on cores that are shared."""
    work, moved = load(problem, split, world), traffic(plan, problem, world, passes)
    crowd = max(1.0, world / cores)
    busy = _busiest(work, world, cores, stepwise=plan in ("ring", "decode"))
    if plan == "ulysses":  # all rows of some heads: even, whatever the split
        busy = np.array([work.mean.sum() * crowd])
    train = passes == "train"
    of_blocks = plan in ("ring", "decode")
    forward = float(flops(problem, busy.sum(), FORWARD))
    met = problem.tokens / world * problem.kv * crowd if plan == "decode" else 0.0
    return {
        "forward": 0.0 if of_blocks else forward,
        "blocks": forward if of_blocks else 0.0,
        "backward": float(flops(problem, busy.sum(), BACKWARD)) if train else 0.0,
        "read": met * problem.size * (2 if train else 1),
        "written": met * 4 if train else 0.0,
        "copy": moved.payload * crowd,
        "merge": _merged(plan, problem, world, train=train) * crowd,
        "message": (moved.messages + moved.steps) * crowd,
        "call": (2 if train else 1) * crowd,
    }


def predict(
    plan: str,
    problem: Problem,
    world: int,
    machine: Machine,
    link: Link | None = None,
    *,
    passes: str = "forward",
    split: str = "zigzag",
    overlap: bool = True,
) -> Prediction:
    """What a call takes; without `overlap` the ring waits for every block before it computes."""
    link = Link() if link is None else link
    todo = amounts(plan, problem, world, passes, split, machine.cores)
    cpu = {kind: todo[kind] * machine.of(kind) for kind in KINDS}
    moved = traffic(plan, problem, world, passes)
    if plan == "ring":
        work = load(problem, split, world)
        busy = _busiest(work, world, machine.cores, stepwise=True)
        return _ring(problem, world, machine, link, passes, cpu, busy, moved, overlap=overlap)
    bandwidth = link.bandwidth * (link.bisection if plan == "ulysses" else 1.0)
    wire = (moved.payload + moved.agreement) / bandwidth + moved.messages * link.latency
    return Prediction(cpu, wire, wire)


def _ring(
    problem: Problem,
    world: int,
    machine: Machine,
    link: Link,
    passes: str,
    cpu: dict[str, float],
    busy: NDArray[np.float64],
    moved: Traffic,
    *,
    overlap: bool,
) -> Prediction:
    """Step by step: the next block (and, backward, the last block's sums) travels meanwhile."""
    own = problem.tokens / world * problem.kv
    block = own * problem.size / link.bandwidth + link.latency
    sums = own * 4 / link.bandwidth + link.latency
    talk = moved.agreement / link.bandwidth + moved.messages * link.latency
    wires = [np.full(world - 1, block)]
    behind = [flops(problem, busy, FORWARD)[:-1] * machine.blocks]
    last = 0.0
    if passes == "train" and world > 1:
        # Sums are under way from the third step on: the first are made in the second. In the last step nothing else is,
        # and the way home is behind nothing.
        wires.append(np.full(world, block + sums))
        wires[-1][:2] = block
        wires[-1][-1] = sums if world > 2 else 0.0
        behind.append(flops(problem, busy, BACKWARD) * machine.backward)
        last = sums
    wire = float(sum(x.sum() for x in wires)) + talk + last
    if not overlap:
        return Prediction(cpu, wire, wire)
    exposed = sum(float(np.maximum(x - y, 0).sum()) for x, y in zip(wires, behind, strict=True))
    return Prediction(cpu, wire, exposed + last + talk)


def _busiest(work: Load, world: int, cores: float, *, stepwise: bool) -> NDArray[np.float64]:
    """Pairs per step that the clock sees: the busiest rank's, or all ranks' on too few cores."""
    if stepwise:
        return np.maximum(work.busiest, work.mean * world / cores)
    return np.array([max(work.busiest.sum(), work.mean.sum() * world / cores)])


def _merged(plan: str, problem: Problem, world: int, *, train: bool) -> float:
    """Bytes of states that are folded one by one, and of the sums of gradients."""
    state = problem.heads * (4 * problem.width + STATISTICS)
    sums = problem.heads * problem.width * 4 if train else 0
    if plan == "ring":  # rows / world of them, world times
        return problem.rows * (state + sums)
    if plan == "decode":
        return world * problem.rows * (state + sums)
    return 0.0
