"""The measurement itself: every rank of a group runs this; rank 0 has the result.

A cell is run in rounds. In each round all ranks start together, once untraced, for the time (of the slowest rank), and
once traced, for where it went and how many bytes moved. Rank 0 also runs every problem alone while the others sleep,
and every rank compares its rows with that answer. Numbers travel as tensors.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from levelhead import _core, distributed
from levelhead.attention import attention
from levelhead.bench.measure import timed
from levelhead.cluster.cases import Cell
from levelhead.cluster.problem import PASSES, Problem
from levelhead.cluster.traffic import traffic
from levelhead.distributed import Split, Trace

TOLERANCE = 1e-4  # of rows against one process, relative: beyond rounding, the answer is wrong
TRACED = ("seconds", "compute", "transfer", "wait", "sent", "received")

Arrays = dict[str, Tensor]
Tell = Callable[[str, str], None]  # is called with (problem, current step), on every rank
Save = Callable[[list[dict[str, Any]]], None]  # is called with the cells so far, on rank 0


def measure(cells: list[Cell], threads: int, rounds: int, tell: Tell, save: Save) -> list[dict[str, Any]]:
    """Every cell's numbers, on rank 0; the other ranks get the same list without reports."""
    torch.set_num_threads(threads)
    measured: list[dict[str, Any]] = []
    for (name, problem), group in groupby(cells, key=lambda cell: (cell.about, cell.problem)):
        every = list(group)
        tell(name, "one process alone")
        arrays = _arrays(problem)
        alone, truth = _alone(problem, arrays, threads, rounds)
        parts = [_Part(cell, arrays, threads) for cell in every]
        for part in parts:
            tell(name, f"{part.cell.way}, warming up")
            part.warm(truth)
        for number in range(rounds):  # in turns, so that a slow minute affects all cells
            for part in parts:
                tell(name, f"{part.cell.way}, round {number + 1} of {rounds}")
                part.round()
        measured += [part.numbers(alone) for part in parts]
        if dist.get_rank() == 0:
            save(measured)
    return measured


def _arrays(problem: Problem) -> Arrays:
    """The whole sequence, the same on every rank."""
    draw = torch.Generator().manual_seed(problem.tokens)
    rows = (1, problem.heads, problem.rows, problem.width)
    keys = (1, problem.groups, problem.tokens, problem.width)
    shapes = {"q": rows, "k": keys, "v": keys, "dout": rows}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def _alone(problem: Problem, arrays: Arrays, threads: int, rounds: int) -> tuple[dict[str, dict[str, float]], Tensor]:
    """Seconds of rank 0 alone, by threads and passes; and its output, which every rank gets."""
    taken: dict[str, dict[str, float]] = {}
    out = torch.empty_like(arrays["dout"])
    if dist.get_rank() == 0:
        for name, team in (("same_threads", threads), ("all_cpus", _core.default_threads())):
            taken[name] = {}
            for passes in PASSES:
                call = partial(_step, partial(attention, causal=problem.causal, threads=team), arrays, passes)
                out.copy_(call())
                taken[name][passes] = statistics.median(timed(call) for _ in range(rounds))
    dist.broadcast(out, 0)
    return taken, out


def _step(attend: Callable[..., Tensor], arrays: Arrays, passes: str) -> Tensor:
    """Passes with q, k and v as fresh leaves of autograd: nothing adds up from call to call."""
    out = attend(*(arrays[name].detach().requires_grad_(passes == "train") for name in "qkv"))
    if passes == "train":
        out.backward(arrays["dout"])  # type: ignore[no-untyped-call]
    return out.detach()


@dataclass
class _Part:
    """A cell on this rank."""

    cell: Cell
    whole: Arrays
    threads: int
    seconds: list[float] = field(default_factory=list)
    traced: list[list[float]] = field(default_factory=list)  # as TRACED
    gap: float = 0.0

    def __post_init__(self) -> None:
        world = dist.get_world_size()
        self.split: Split = getattr(Split, self.cell.split)(self.cell.problem.tokens, world)
        self.arrays = {name: self._own(x, name in "kv") for name, x in self.whole.items()}

    def _own(self, x: Tensor, keys: bool) -> Tensor:
        if self.cell.plan == "decode" and not keys:
            return x
        part: Tensor = self.split.shard(x, dist.get_rank())
        return part.contiguous()

    def warm(self, truth: Tensor) -> None:
        """The first call, whose rows are compared with one process's."""
        rows, wanted = self._call(None), self._own(truth, False)
        self.gap = float((rows - wanted).abs().max()) if rows.numel() else 0.0

    def round(self) -> None:
        dist.barrier()
        self.seconds.append(timed(lambda: self._call(None)))
        trace = Trace()
        dist.barrier()
        took = timed(lambda: self._call(trace))
        times = [trace.seconds(kind) for kind in ("compute", "transfer", "wait")]
        self.traced.append([took, *times, float(trace.sent), float(trace.received)])

    def _call(self, trace: Trace | None) -> Tensor:
        cell = self.cell
        split = (None, self.split) if cell.plan == "decode" else self.split
        attend = partial(distributed.attention, plan=cell.plan, causal=cell.problem.causal, threads=self.threads)
        return _step(partial(attend, split=split, trace=trace), self.arrays, cell.passes)

    def numbers(self, alone: dict[str, dict[str, float]]) -> dict[str, Any]:
        """The cell's numbers from all ranks."""
        cell, lengths = self.cell, self.split.lengths
        seconds = gathered(torch.tensor([*self.seconds, self.gap], dtype=torch.float64))
        traced = gathered(torch.tensor(self.traced, dtype=torch.float64).mean(0))
        slowest = seconds[:, :-1].amax(0).tolist()
        by_rank = dict(zip(TRACED, traced.T.tolist(), strict=True))
        by_rank["other"] = (traced[:, 0] - traced[:, 1] - traced[:, 3]).tolist()
        world = len(lengths)
        due = [traffic(cell.plan, cell.problem, world, cell.passes, lengths, rank) for rank in range(world)]
        return dict(
            **asdict(cell),
            seconds=slowest,
            best=min(slowest),
            median=statistics.median(slowest),
            ranks=by_rank,
            bytes={name: [getattr(x, name) for x in due] for name in ("payload", "bound", "agreement")},
            alone={name: taken[cell.passes] for name, taken in alone.items()},
            error=float(seconds[:, -1].max()),
            right=bool(seconds[:, -1].max() < TOLERANCE),
        )


def gathered(x: Tensor) -> Tensor:
    """Every rank's x, stacked."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.stack(parts)
