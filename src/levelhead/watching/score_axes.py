"""Which axis of a tensor of scores holds queries, keys and heads, however it was reshaped.

A product of (N, T, D) and (N, D, S) has scores (N, T, S). A stand-in without numbers goes through the same views as the
scores; its strides show where each axis comes from, and so which rows of the factors belong to an entry.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

Origin: TypeAlias = Literal["batch", "left", "right"]
_BITS = 20
LEFT, BATCH = 1 << _BITS, 1 << (2 * _BITS)  # strides of the stand-in: right 1, left 2^20, batch 2^40


def stand_in(n: int, rows: int, columns: int) -> Tensor | None:
    """Of scores (N, T, S) fresh from their product; None: too many for the strides."""
    if max(rows, columns) >= LEFT or n >= 1 << (62 - 2 * _BITS):
        return None
    return torch.empty_strided((n, rows, columns), (BATCH, LEFT, 1), dtype=torch.uint8, device="meta")


def origin(axes: Tensor, axis: int) -> Origin | None:
    """Where an axis comes from; None: from nowhere, it has one entry or repeats."""
    stride = axes.stride(axis)
    if axes.shape[axis] == 1 or stride == 0:
        return None
    return "batch" if stride >= BATCH else "left" if stride >= LEFT else "right"


@dataclass(frozen=True)
class Arrangement:
    """The axes of scores by role; in this order they become (B, H, T, S)."""

    batch: tuple[int, ...]
    heads: tuple[int, ...]
    queries: tuple[int, ...]
    keys: int
    split: int = 1  # so many heads are a part of the one batch axis
    heads_first: bool = False  # its outer part, else its inner one
    grouped: int = 1  # so many heads share keys, and are the outer part of the queries' axis

    def scores(self, x: Tensor) -> Tensor:
        """(B, H, T, S) of any tensor with the axes of the scores."""
        shape, order = x.shape, (*self.batch, *self.heads, *self.queries, self.keys)
        B, H, T = (math.prod(shape[axis] for axis in part) for part in (self.batch, self.heads, self.queries))
        return self._ungrouped(self._split(x.permute(order).reshape(B, H, T, shape[self.keys])))

    def _ungrouped(self, x: Tensor) -> Tensor:
        """(B, H, T, ...) with the heads that lie among the queries."""
        B, H, T, last = x.shape
        return x.reshape(B, H * self.grouped, T // self.grouped, last)

    def _split(self, x: Tensor) -> Tensor:
        """(B, H, ...) with the heads that lie in the batch."""
        if self.heads_first:
            return x.reshape(self.split, x.shape[0] * x.shape[1] // self.split, *x.shape[2:]).transpose(0, 1)
        return x.reshape(x.shape[0] // self.split, x.shape[1] * self.split, *x.shape[2:])

    def factors(self, axes: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """q (B, H, T, D) and k (B, G, S, D), of a product of left (N, T, D) and right (N, D, S)."""
        turned = origin(axes, self.keys) == "left"
        q, k = (right.mT, left) if turned else (left, right.mT)
        of_q, of_k = ("right", "left") if turned else ("left", "right")
        own = [axis for axis in self.heads if _step(axes, axis, k, of_k)]  # the other heads share their keys
        parts_q = taken(axes, q, of_q, (*self.batch, *self.heads, *self.queries))
        parts_k = taken(axes, k, of_k, (*self.batch, *own, self.keys))
        B, H, T = (math.prod(axes.shape[a] for a in part) for part in (self.batch, self.heads, self.queries))
        G, S = math.prod(axes.shape[axis] for axis in own), axes.shape[self.keys]
        return self._ungrouped(self._split(parts_q.reshape(B, H, T, -1))), self._split(parts_k.reshape(B, G, S, -1))


def taken(axes: Tensor, x: Tensor, own: str, order: Sequence[int]) -> Tensor:
    """x (N, n, D) as the scores' axes `order` index it."""
    x = x.contiguous()
    sizes = [axes.shape[axis] for axis in order]
    steps = [_step(axes, axis, x, own) for axis in order]
    start = axes.storage_offset()
    first = start // BATCH * x.stride(0)
    first += (start % BATCH // LEFT if own == "left" else start % LEFT) * x.stride(1)
    return x.as_strided((*sizes, x.shape[2]), (*steps, 1), x.storage_offset() + first)


def _step(axes: Tensor, axis: int, x: Tensor, own: str) -> int:
    """By how many numbers of a contiguous x (N, n, D) an axis advances."""
    stride, where, width = axes.stride(axis), origin(axes, axis), x.shape[2]
    if where == "batch":
        return stride // BATCH * x.shape[1] * width
    return stride // (LEFT if own == "left" else 1) * width if where == own else 0


def places(axes: Tensor, keys: int) -> list[tuple[list[int], list[int]]]:
    """The axes of queries, and those of heads and a batch, with the softmax over axis `keys`; several if one factor's
    rows are positions and heads, the likeliest first; none: the softmax is over neither factor's rows."""
    over = origin(axes, keys)
    if over == "batch":
        return []
    across = "right" if over == "left" else "left"
    rest = [axis for axis in range(axes.dim()) if axis != keys]
    queries = [axis for axis in rest if origin(axes, axis) == across]
    if len(queries) > 1 and math.prod(axes.shape[axis] for axis in queries) != axes.shape[keys]:
        # As many as keys, or innermost; what is around them is a group of heads, or a batch.
        order = sorted(queries, key=lambda axis: (axes.shape[axis] != axes.shape[keys], axes.stride(axis)))
        return [([axis], [other for other in rest if other != axis]) for axis in order]
    if not queries:
        beside = [axis for axis in rest if axes.shape[axis] == 1]
        queries = [axis for axis in beside if axis == keys - 1] or beside[-1:]
    return [(queries, [axis for axis in rest if axis not in queries])]
