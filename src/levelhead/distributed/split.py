"""Which rank owns which positions of a sequence. A split is data, never implied by a rank's number.

A shard is a list of runs (start, length, stride) with rising positions; shards may be ragged or empty. Together they
hold every position 0 … n - 1 exactly once, which is checked when a split is made. This file cuts tensors and puts them
together again; it sends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from levelhead.call.segments import positions
from levelhead.checks import integer
from levelhead.distributed.agree import mark
from levelhead.errors import bad_type, bad_value

Run: TypeAlias = tuple[int, int, int]  # start, length, stride
Runs: TypeAlias = tuple[Run, ...]

_WHOLE = "an integer of at least 1"
_RUN = "runs (start, length, stride) whose positions rise"


@dataclass(frozen=True)
class Split:
    """The runs of every rank's shard.

    >>> Split.zigzag(8, 2)
    Split(runs=(((0, 2, 1), (6, 2, 1)), ((2, 4, 1),)))
    """

    runs: tuple[Runs, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "runs", tuple(rising(shard) for shard in self.runs))
        _require_whole(self)

    # ---- common splits

    @classmethod
    def contiguous(cls, n: int, world: int) -> Split:
        """A stretch for each rank, in rank order, as even as possible."""
        ends = _cuts(n, world)
        return cls.lengths_in_order([b - a for a, b in pairwise(ends)])

    @classmethod
    def lengths_in_order(cls, lengths: Sequence[int]) -> Split:
        """A stretch of a given length for each rank, in rank order; 0 is an empty shard."""
        return _in_order(tuple(lengths))

    @classmethod
    def zigzag(cls, n: int, world: int) -> Split:
        """2 · world stretches; rank r has the r-th from the front and the r-th from the end, so that under a causal
        mask all ranks have about the same number of visible keys."""
        ends = _cuts(n, 2 * world)
        stretch = [(a, b - a, 1) for a, b in pairwise(ends)]
        return cls(tuple((stretch[r], stretch[2 * world - 1 - r]) for r in range(world)))

    @classmethod
    def striped(cls, n: int, world: int, block: int = 1) -> Split:
        """Blocks of `block` tokens, distributed in turns. Single tokens are one run; blocks are many, which the kernel
        searches row by row: zigzag is as even, and faster."""
        _cuts(n, world)
        integer("block", block, _WHOLE, "Pass 1 for single tokens", lambda n: n >= 1)
        if block == 1:
            return cls(tuple(((r, len(range(r, n, world)), world),) for r in range(world)))
        starts = [range(r * block, n, world * block) for r in range(world)]
        return cls(tuple(tuple((a, min(block, n - a), 1) for a in each) for each in starts))

    @classmethod
    def balanced(cls, n: int, world: int, *, causal: bool = True) -> Split:
        """The default choice: zigzag under a causal mask, else contiguous."""
        return cls.zigzag(n, world) if causal else cls.contiguous(n, world)

    # ---- properties

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.runs)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of every rank."""
        return tuple(sum(length for _, length, _ in shard) for shard in self.runs)

    @cached_property
    def n(self) -> int:
        """Tokens of the sequence."""
        return sum(self.lengths)

    @cached_property
    def fingerprint(self) -> int:
        """A hash with which ranks compare their splits."""
        return mark(self.runs)

    def positions(self, rank: int) -> NDArray[np.int64]:
        """The positions of a rank's tokens, in the order of its shard."""
        return positions(self.runs[rank])

    # ---- cutting, and putting together

    def shard(self, x: Any, rank: int, dim: int = -2) -> Any:
        """A rank's part of a tensor or array; a view where its tokens are one run."""
        if x.shape[dim] != self.n:
            advice = "Shard the whole sequence; dim says where its tokens are"
            raise bad_value("x", f"{self.n} tokens along dimension {dim}", f"shape {tuple(x.shape)}", advice)
        return select(x, self.runs[rank], dim)

    def unshard(self, parts: Sequence[Any], dim: int = -2) -> Any:
        """The whole of what `shard` cut, from every rank's part in rank order."""
        lengths = tuple(part.shape[dim] for part in parts)
        if lengths != self.lengths:
            wanted = f"parts of {self.lengths} tokens along dimension {dim}"
            raise bad_value("parts", wanted, lengths, "One part per rank, in order")
        order = np.argsort(np.concatenate([self.positions(r) for r in range(self.world)]))
        if not isinstance(parts[0], Tensor):
            return np.concatenate(parts, dim).take(order, dim)
        return torch.cat(list(parts), dim).index_select(dim, torch.from_numpy(order))

    def place(self, whole: Tensor, rank: int, part: Tensor, dim: int = -2) -> None:
        """Writes a rank's part to its positions in the whole."""
        runs = self.runs[rank]
        if len(runs) == 1:
            select(whole, runs, dim).copy_(part)
        elif runs:
            whole.index_copy_(dim, torch.from_numpy(positions(runs)), part)


# ---- runs


def all_positions(split: Split) -> Runs:
    """The runs of the whole sequence."""
    return ((0, split.n, 1),) if split.n else ()


def select(x: Any, runs: Runs, dim: int) -> Any:
    """The elements at the runs' positions along a dimension; a view of one run, else a copy."""
    if len(runs) <= 1:
        start, length, stride = runs[0] if runs else (0, 0, 1)
        index = [slice(None)] * len(x.shape)
        index[dim] = slice(start, start + length * stride, stride)
        return x[tuple(index)]
    if isinstance(x, Tensor):
        return x.index_select(dim, torch.from_numpy(positions(runs)))
    return np.take(x, positions(runs), dim)


def rising(runs: Any) -> Runs:
    """Runs in normal form: none is empty, adjacent ones are joined. An error unless positions rise."""
    joined: list[Run] = []
    end = 0
    try:
        integers = [tuple(integer("split", x, _RUN, "") for x in run) for run in runs]
    except TypeError:
        raise bad_type("split", _RUN, repr(runs)[:60], "See Split") from None
    for run in integers:
        if len(run) != 3 or run[1] < 0 or run[2] < 1 or (run[1] and run[0] < end):
            raise bad_value("split", _RUN, run, "Sort a shard's tokens by position, and count from 0")
        start, length, stride = run
        if not length:
            continue
        if joined and start == end and stride == joined[-1][2] == 1:
            start, length = joined[-1][0], joined.pop()[1] + length  # continues the last one
        joined.append((start, length, stride if length > 1 else 1))
        end = start + (length - 1) * stride + 1
    return tuple(joined)


def _cuts(n: int, parts: int) -> list[int]:
    """The bounds of parts of n tokens that are as even as possible."""
    integer("n", n, "an integer of at least 0", "Pass the number of tokens", lambda n: n >= 0)
    integer("world", parts, _WHOLE, "Pass the number of ranks", lambda n: n >= 1)
    return [n * i // parts for i in range(parts + 1)]


@lru_cache(maxsize=256)  # decoding has a new length at every step
def _in_order(lengths: tuple[int, ...]) -> Split:
    ends = np.cumsum([0, *lengths]).tolist()
    return Split(tuple(((a, n, 1),) for a, n in zip(ends, lengths, strict=False)))


def _require_whole(split: Split) -> None:
    """Every position once: else an error that names a position and its ranks."""
    flat = [run for shard in split.runs for run in shard]
    end = 0
    for start, length, _ in flat if all(run[2] == 1 for run in flat) else ():
        if start != end:
            break
        end += length
    if end == split.n:
        return  # in order, the most common case
    held = [split.positions(rank) for rank in range(split.world)]
    every = np.concatenate(held)
    times = np.bincount(every, minlength=split.n)
    for position in np.flatnonzero(times != 1)[:1].tolist():
        owners = [rank for rank, mine in enumerate(held) if position in mine]
        given = f"position {position} on ranks {owners}" if owners else f"no rank with {position}"
        wanted = f"every position 0 … {split.n - 1} on one rank, as there are {split.n} tokens"
        raise bad_value("split", wanted, given, "A shard is missing, given twice or in a wrong place")
