"""Which axes of scores are heads.

A module may say how many heads it has; an axis of that size may still be the batch. The layers that ran before show it:
a head's queries are a part of the columns that a projection put out. Where neither decides, heads are not told apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from levelhead.watching import merged_axes, score_axes
from levelhead.watching.sampled import Layer, apart
from levelhead.watching.score_axes import Arrangement
from levelhead.watching.scores import Scores

_SAME = 1e-2  # apart at most, relative to the whole
_USUAL = 4  # axes of (B, H, T, S)
TOGETHER = (
    "which axis of the scores is heads is not known: heads are not told apart, the statistics are of all together"
)


def arranged(
    known: Scores,
    shape: torch.Size,
    keys: int,
    heads: int | None,
    ran: Callable[[], Sequence[Layer]],
    *,
    usual: bool = True,
) -> tuple[Arrangement | None, bool]:
    """The roles of the axes of scores with a softmax over axis `keys`, and whether heads are told apart; None: it is
    over no rows of either factor. `heads`: how many there are, if that is known; `ran`: the layers before; `usual`:
    whether (B, H, T, S) will do where no layer shows it."""
    if known.axes is None:
        return _lost(known, shape, keys, heads, ran)
    places = score_axes.places(known.axes, keys)
    if not places:
        return None, True
    queries, others = places[0]
    long = _long(shape, others)
    exact = [part for part in _parts(long) if _size(shape, part) == heads]
    if len(exact) == len(places) == 1 and _at_the_end(exact[0], long) and len(exact[0]) < len(long):
        batch = tuple(axis for axis in others if axis not in exact[0])
        return Arrangement(batch, tuple(exact[0]), tuple(queries), keys), True
    layers = ran()
    tried = [one for place in places for one in _candidates(known, *place, keys, heads, layers)]
    for fits in (_queries_fit, _keys_fit):
        for one in tried:
            if fits(one, known, layers):
                return one, True
    usual = usual and bool(tried) and _is_usual(tried[0], long) and not _may_be_folded(tried[0], shape, layers)
    if usual and len(shape) <= _USUAL and len(places) == 1:
        # One head for each of these, unless layers show that their columns have several.
        widths = {one.rows.shape[1] for one in layers if not one.norm}
        return tried[0], bool(tried[0].heads) or heads == 1 or not widths or known.left.shape[2] in widths
    return Arrangement(tuple(others), (), tuple(queries), keys), False


def _lost(
    known: Scores, shape: torch.Size, keys: int, heads: int | None, ran: Callable[[], Sequence[Layer]]
) -> tuple[Arrangement | None, bool]:
    """Of scores that went through an operator without a rule: as they were before it, if their axes are the same."""
    was = known.was
    together = replace(_by_shape(shape, keys, None), heads=())
    if was is None:
        return together, heads == 1
    if not known.moved and was.dim() == len(shape):
        try:
            before, apart = arranged(replace(known, axes=was), was.shape, keys, heads, ran)
        except RuntimeError:  # more of a batch, say, than the factors have
            return together, heads == 1
        if before is None or all(was.shape[axis] == shape[axis] for axis in (*before.batch, *before.heads)):
            return before, apart
        return together, heads == 1
    if heads is not None and sorted(shape) == sorted((*was.shape, heads)):  # written or put side by side, head by head
        return _by_shape(shape, keys, heads), list(shape).count(heads) == 1
    for axis in range(was.dim()):  # blocks of keys of the same queries
        if score_axes.origin(was, axis) == "batch" and not merged_axes.differs(was, known.left, "left", axis):
            was = was.narrow(axis, 0, 1)
    over = next((axis for axis in reversed(range(was.dim())) if score_axes.origin(was, axis) == "right"), was.dim() - 1)
    before, apart = arranged(replace(known, axes=was), was.shape, over, heads, ran)
    usual = before is not None and before.grouped == before.split == 1
    n = _size(was.shape, before.heads) if before is not None and usual and apart else 0
    if n > 1 and list(was.shape).count(n) > 1:  # of several axes of this size, another may be the one that is left
        n = heads or 0
    chosen = _by_shape(shape, keys, n)
    return (chosen, True) if chosen.heads and heads in (None, n) else (together, heads == 1)


def _by_shape(shape: torch.Size, keys: int, heads: int | None) -> Arrangement:
    """Heads are the only axes with so many entries."""
    rest = [axis for axis in range(len(shape)) if axis != keys]
    found = [part for part in _parts(_long(shape, rest)) if _size(shape, part) == heads]
    chosen = found[0] if len(found) == 1 else []
    others = [axis for axis in rest if axis not in chosen]
    return Arrangement(tuple(others[:-1]), tuple(chosen), tuple(others[-1:]), keys)


def _candidates(
    known: Scores, queries: list[int], others: list[int], keys: int, heads: int | None, layers: Sequence[Layer]
) -> Iterator[Arrangement]:
    """Ways to read the axes, the usual one first."""
    assert known.axes is not None
    shape = known.axes.shape
    long = _long(shape, others)

    def at(chosen: Sequence[int], **more: int | bool) -> Arrangement:
        batch = tuple(axis for axis in others if axis not in chosen)
        return replace(Arrangement(batch, tuple(chosen), tuple(queries), keys), **more)  # type: ignore[arg-type]

    parts = _parts(long)
    exact = [part for part in parts if _size(shape, part) == heads]
    yield from map(at, exact)
    if heads is None and others:
        grouped = len(long) > 2 and score_axes.origin(known.axes, long[-1]) == "left"
        first = [] if len(others) < 2 else long[-2:] if grouped else long[-1:]
        yield at(first)
        yield from (at(part) for part in parts if part != first)
    if any(_at_the_end(part, long) and len(part) < len(long) for part in exact):
        return
    for n in _numbers_of_heads(known, layers) if heads is None else [heads]:
        if len(long) == 1 and n > 1 and shape[long[0]] % n == 0 and shape[long[0]] > n:
            yield at([], split=n)
            yield at([], split=n, heads_first=True)
        for part in ([], *_ends(long)) if len(queries) == 1 else ():
            times = n // _size(shape, part)
            if times > 1 and n % times == 0 and shape[queries[0]] % times == 0:
                yield at(part, grouped=times)
    if not exact or len(long) == 1:  # a batch; or fewer here than the module says, as after pruning
        yield from (at(part) for part in ([], *parts))


def _is_usual(one: Arrangement, others: list[int]) -> bool:
    """Whether heads are the axes next to the queries, or lie in the batch's one axis."""
    return one.grouped == one.split == 1 and _at_the_end(one.heads, others)


def _at_the_end(part: Sequence[int], axes: list[int]) -> bool:
    return list(part) == axes[len(axes) - len(part) :]


def _queries_fit(one: Arrangement, known: Scores, layers: Sequence[Layer]) -> bool:
    """Whether the heads of queries are parts of what a layer put out."""
    assert known.axes is not None
    return _is_part(one.factors(known.axes, known.left, known.right)[0], one, known.axes, layers)


def _keys_fit(one: Arrangement, known: Scores, layers: Sequence[Layer]) -> bool:
    """The same of keys, where a head has its own. Heads that share keys may be rows of one query axis."""
    assert known.axes is not None
    q, k = one.factors(known.axes, known.left, known.right)
    own = k.shape[1] == q.shape[1] and not _may_be_folded(one, known.axes.shape, layers)
    return own and _is_part(k, one, known.axes, layers)


def _is_part(x: Tensor, one: Arrangement, axes: Tensor, layers: Sequence[Layer]) -> bool:
    if x.is_complex():
        return False
    lead = [axes.shape[axis] for axis in one.batch] if one.split == 1 else [x.shape[0]]
    # One norm may have served all heads, as rows of its own.
    used = [layer for layer in layers if x.shape[1] > 1 or not layer.norm]
    return apart(x, used, lead) < _SAME


def _may_be_folded(one: Arrangement, shape: Sequence[int], layers: Sequence[Layer]) -> bool:
    """Whether the queries are several times a layer's tokens, and no layer has as many."""
    rows = _size(shape, one.queries)
    tokens = {layer.tokens for layer in layers if layer.tokens and not layer.norm}
    whole = _size(shape, one.batch) * rows
    times = {whole // n for n in tokens if whole % n == 0}
    return rows != shape[one.keys] and 1 not in times and any(rows % n == 0 for n in times)


def _numbers_of_heads(known: Scores, layers: Sequence[Layer]) -> list[int]:
    """That the widths of layers allow."""
    width = known.left.shape[2]
    return sorted({one.rows.shape[1] // width for one in layers if width and one.rows.shape[1] % width == 0} - {0})


def _long(shape: Sequence[int], axes: list[int]) -> list[int]:
    """Those with several entries; the last if there are none."""
    return [axis for axis in axes if shape[axis] > 1] or axes[-1:]


def _ends(axes: list[int]) -> list[list[int]]:
    """The last axis, the last two …"""
    return [axes[n:] for n in reversed(range(len(axes)))]


def _parts(others: list[int]) -> list[list[int]]:
    """Axes that may be heads: those at the end, any one, and any two beside each other."""
    parts = [*_ends(others), *([axis] for axis in others), *(others[n : n + 2] for n in range(len(others) - 1))]
    return [part for n, part in enumerate(parts) if part not in parts[:n]]


def _size(shape: Sequence[int], axes: Sequence[int]) -> int:
    return math.prod(shape[axis] for axis in axes)
