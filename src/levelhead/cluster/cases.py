"""What `levelhead cluster-bench` measures: plans × splits × passes, over two kinds of scaling.

Strong scaling keeps the sequence, weak scaling keeps the tokens of a rank. Heads divide by 1, 2, 3 and 4, so that all
plans take part there; where heads do not divide, ulysses is left out, and the result names it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from levelhead.cluster.problem import PASSES, SPLITS, Problem

SELF_ATTENTION = ("all-gather", "ring", "ulysses")
HEADS, WIDTH = 12, 64


@dataclass(frozen=True, slots=True)
class Effort:
    """How large and how often."""

    name: str
    strong: tuple[int, ...]  # tokens of the sequence
    weak: tuple[int, ...]  # tokens per rank
    keys: int  # that queries of the decode plan attend to, in strong scaling
    queries: int
    rounds: int
    heads: int = HEADS
    width: int = WIDTH


TINY = Effort("tiny", strong=(96,), weak=(48,), keys=256, queries=4, rounds=1, width=16)
QUICK = Effort("quick", strong=(1024,), weak=(512,), keys=8192, queries=8, rounds=3)
FULL = Effort("full", strong=(1024, 3072), weak=(384, 768), keys=49152, queries=8, rounds=5)
EFFORTS = {effort.name: effort for effort in (TINY, QUICK, FULL)}


@dataclass(frozen=True, slots=True)
class Cell:
    """One thing to measure."""

    kind: str  # "strong" or "weak"
    plan: str
    passes: str
    split: str
    problem: Problem

    @property
    def about(self) -> str:
        """The problem in words."""
        shape = "decode" if self.problem.queries else "causal" if self.problem.causal else "dense"
        return f"{self.kind}, {self.problem.tokens} tokens, {shape}"

    @property
    def way(self) -> str:
        """Plan, split and passes in words."""
        return f"{self.plan} {self.split} {self.passes}"


def cells(effort: Effort, world: int) -> list[Cell]:
    """All cells that so many ranks can run."""
    return [*_kind("strong", effort, world), *_kind("weak", effort, world)]


def left_out(effort: Effort, world: int) -> dict[str, str]:
    """Plans that this world cannot run, and why."""
    if effort.heads % world:
        return {"ulysses": f"{effort.heads} heads do not divide by {world} ranks"}
    return {}


def _kind(kind: str, effort: Effort, world: int) -> Iterator[Cell]:
    strong = kind == "strong"
    plans = [plan for plan in SELF_ATTENTION if plan not in left_out(effort, world)]
    for tokens in effort.strong if strong else (world * n for n in effort.weak):
        for causal, split in ((False, SPLITS[0]), *((True, split) for split in SPLITS)):
            problem = Problem(tokens, effort.heads, effort.heads, effort.width, causal)
            for plan in plans:
                yield from (Cell(kind, plan, passes, split, problem) for passes in PASSES)
    keys = effort.keys if strong else effort.keys // 2 * world
    few = Problem(keys, effort.heads, effort.heads, effort.width, queries=effort.queries)
    yield from (Cell(kind, "decode", passes, SPLITS[0], few) for passes in PASSES)
