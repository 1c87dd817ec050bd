"""Axes of scores that a reshape made one: whether scores of several queries lie along it.

A softmax over such an axis is over more than the keys of one query, such as those of all heads. Blocks of keys beside
each other are keys of the same query, and no such case: there the queries are equal along the axis of the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from levelhead.watching import score_axes
from levelhead.watching.score_axes import Origin

_COMPARED = 4  # entries of every other axis


class Merged(NamedTuple):
    """An axis that was several."""

    size: int
    place: int  # counted from the end


def of_several_queries(axes: Tensor, left: Tensor, right: Tensor, shape: Sequence[int]) -> tuple[Merged, ...]:
    """Axes of this shape along which keys of different queries lie, after a reshape of scores with `axes`."""
    return tuple(one for old, one in _merged(axes.shape, shape) if _mixes(axes, left, right, old))


def is_one(merged: Sequence[Merged], shape: Sequence[int], axis: int) -> bool:
    """Whether an axis of scores is one of these, after operators that were not followed."""
    size = shape[axis]
    place = axis - len(shape)
    return any(one.size == size and (list(shape).count(size) == 1 or one.place == place) for one in merged)


def _merged(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[list[int], Merged]]:
    """Axes of `before` that are one axis of `after`."""
    start = 0
    for n, size in enumerate(after):
        axes, product = [], 1
        while start < len(before) and product < size:
            axes.append(start)
            product, start = product * before[start], start + 1
        if product != size:  # an axis was divided: what follows is not known
            return
        if len(axes) > 1:
            yield axes, Merged(size, n - len(after))


def _mixes(axes: Tensor, left: Tensor, right: Tensor, merged: list[int]) -> bool:
    origins = [score_axes.origin(axes, axis) for axis in merged]
    if "left" in origins or "right" in origins:
        queries: tuple[Tensor, Origin] = (right.mT, "right") if "left" in origins else (left, "left")
        around = [axis for axis, origin in zip(merged, origins, strict=True) if origin == "batch"]
        both = "left" in origins and "right" in origins
        return both or any(differs(axes, *queries, axis) for axis in around)
    return False


def differs(axes: Tensor, x: Tensor, own: Origin, axis: int) -> bool:
    """Whether rows of a factor (N, n, D) change along an axis of the scores."""
    others = [other for other in range(axes.dim()) if other != axis]
    rows = score_axes.taken(axes, x, own, (axis, *others))
    for place in range(1, len(others) + 1):
        rows = rows.narrow(place, 0, min(rows.shape[place], _COMPARED))
    return not torch.equal(rows, rows[:1].expand_as(rows))
