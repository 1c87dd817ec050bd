"""Scores with something beside them: more keys, more heads, or a column that is a sink."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from levelhead.watching import score_axes
from levelhead.watching.merged_axes import Merged
from levelhead.watching.scores import Factor, Scores, Sink

NAMES = {"cat", "stack"}


def after(name: str, args: tuple[Any, ...], known: list[Any], out: Tensor) -> Scores | None:
    """The scores in `out`; `known`: those among the tensors that are joined, None elsewhere."""
    dim = (args[1] if len(args) > 1 else 0) % out.dim()
    if name == "stack":
        return _stacked(known, dim) or min((x for x in known if x is not None), key=lambda x: x.shift is None).lost()
    # An empty tensor without axes, as a cache is before its first key, may be beside any.
    shown = [n for n, x in enumerate(args[0]) if x.shape != (0,)]
    if not any(known[n] is not None for n in shown):
        return None
    return _beside([args[0][n] for n in shown], [known[n] for n in shown], dim)


def _stacked(parts: list[Any], dim: int) -> Scores | None:
    """Scores of one head, one key or one query each as those of all; None: they do not fit together."""
    first: Scores = next(x for x in parts if x is not None)
    if not all(x is not None and x.alike(first) for x in parts):
        return None
    assert first.axes is not None
    shape, strides = list(first.axes.shape), list(first.axes.stride())
    shape.insert(dim, len(parts))
    lefts, rights = ([getattr(x, name) for x in parts] for name in ("left", "right"))
    left, right = first.left, first.right
    if right.shape[2] == 1 and _equal(lefts):
        right, stride = torch.cat(rights, 2), 1
    elif left.shape[1] == 1 and _equal(rights):
        left, stride = torch.cat(lefts, 1), score_axes.LEFT
    else:
        left, right, stride = torch.cat(lefts), torch.cat(rights), len(left) * score_axes.BATCH
    strides.insert(dim, stride)
    axes = torch.empty_strided(shape, strides, dtype=torch.uint8, device="meta")
    same = isinstance(first.factor, float) and all(x.factor == first.factor for x in parts)
    factor = first.factor if same else None
    masks: dict[str, Any] = {name: _side_by_side(parts, name, None, dim) for name in ("hidden", "filled")}
    return replace(first, left=left, right=right, factor=factor, axes=axes, before=None, log_over=None, **masks)


def _equal(factors: list[Tensor]) -> bool:
    """Whether it is the same factor every time."""
    first = factors[0]
    where = (first.data_ptr(), first.stride())
    return all((x.data_ptr(), x.stride()) == where or torch.equal(x, first) for x in factors)


def _beside(parts: list[Tensor], known: list[Any], dim: int) -> Scores | None:
    """Scores with something beside them: one more column is a sink, other scores are more keys."""
    scored = [n for n, x in enumerate(known) if x is not None]
    scores: Scores = known[scored[0]]
    if any(known[n].shift is not None for n in scored):  # rows of which only a part was shifted, maybe
        return None
    rest = [x for n, x in enumerate(parts) if n not in scored]
    if len(scored) == 1 and len(rest) == 1 and rest[0].shape[dim] == 1 and scores.axes is not None and not scores.sink:
        keys = scores.axes.shape[dim]
        sink = Sink(dim, scored[0], keys, rest[0].detach())
        hidden, filled = (_padded(x, dim, scored[0]) for x in (scores.hidden, scores.filled))
        return replace(scores, sink=sink, before=None, log_over=None, hidden=hidden, filled=filled)
    several = [known[n] for n in scored]
    if len(several) == len(parts) and (whole := _together_again(several, dim)) is not None:
        return whole
    if len(several) == len(parts) and (whole := _more_heads(several, dim)) is not None:
        return whole
    joined = _joined(several, dim) if len(several) == len(parts) else None
    if joined is None:
        left = scores.lost()
        merged = Merged(sum(x.shape[dim] for x in parts), dim - parts[0].dim())
        return replace(left, merged=(merged,)) if left is not None and _of_several_queries(several, dim) else left
    same = all(isinstance(x.factor, float) and x.factor == scores.factor for x in several)
    return joined if same else replace(joined, factor=None)


def _together_again(parts: list[Scores], dim: int) -> Scores | None:
    """Neighbouring parts of one product, such as heads of which one was scaled; None: they are none."""
    first = parts[0]
    if first.axes is None:
        return None
    place, length, strides = first.axes.storage_offset(), 0, first.axes.stride()
    for part in parts:
        if not part.is_of_product(first) or part.sink is not None or part.axes is None or part.axes.stride() != strides:
            return None
        if part.axes.storage_offset() != place + length * strides[dim]:
            return None
        length += part.axes.shape[dim]
    shape = [length if d == dim else n for d, n in enumerate(first.axes.shape)]
    axes = first.axes.as_strided(shape, strides, place)
    masks: dict[str, Any] = {name: _side_by_side(parts, name, dim) for name in ("hidden", "filled")}
    return replace(first, factor=_factors(parts, dim), axes=axes, before=None, log_over=None, **masks)


def _factors(parts: list[Scores], dim: int) -> Factor:
    """The factor of each, beside each other; one number where they are the same."""
    numbers = [part.factor for part in parts if isinstance(part.factor, float)]
    if len(numbers) < len(parts):
        return None
    if len(set(numbers)) == 1:
        return numbers[0]
    axes = [part.axes for part in parts if part.axes is not None]
    lengths = torch.tensor([x.shape[dim] for x in axes])
    each = torch.tensor(numbers).repeat_interleave(lengths).to(parts[0].left.device)
    return each.view([-1 if d == dim else 1 for d in range(axes[0].dim())])


def _joined(parts: list[Scores], dim: int) -> Scores | None:
    """More keys beside the keys, as after a memory; None: the factors do not fit together."""
    first = parts[0]
    if first.axes is None or score_axes.origin(first.axes, dim) not in ("right", None):
        return None
    if not _equal([part.left for part in parts]):
        return None
    fits = all(
        part.axes is not None
        and part.axes.storage_offset() == 0
        and part.axes.shape[dim] == part.right.shape[2]
        and part.left.shape == first.left.shape
        and [s for d, s in enumerate(part.axes.stride()) if d != dim]
        == [s for d, s in enumerate(first.axes.stride()) if d != dim]
        for part in parts
    )
    if not fits:
        return None
    right = torch.cat([part.right for part in parts], 2)
    shape, strides = list(first.axes.shape), list(first.axes.stride())
    shape[dim], strides[dim] = right.shape[2], 1
    axes = torch.empty_strided(shape, strides, dtype=torch.uint8, device="meta")
    hidden, filled = (_side_by_side(parts, name, dim) for name in ("hidden", "filled"))
    return replace(first, right=right, axes=axes, before=None, log_over=None, hidden=hidden, filled=filled)


def _more_heads(parts: list[Scores], dim: int) -> Scores | None:
    """More heads or sequences beside each other; None: the axes are not (…, queries, keys) with one axis of each."""
    first = parts[0]
    if first.axes is None or dim >= first.axes.dim() - 2 or any(part.softcap != first.softcap for part in parts):
        return None
    lefts, rights = [], []
    for part in parts:
        axes = part.axes
        if axes is None or part.sink is not None or not _is_usual(axes):
            return None
        last = axes.dim() - 1
        lefts.append(score_axes.taken(axes, part.left, "left", range(last)))
        rights.append(score_axes.taken(axes, part.right.mT, "right", (*range(last - 1), last)))
    if len({x.shape[-1] for x in lefts}) > 1:
        return None
    left, right = torch.cat(lefts, dim), torch.cat(rights, dim)
    shape = (*left.shape[:-1], right.shape[-2])
    left, right = left.reshape(-1, *left.shape[-2:]), right.reshape(-1, *right.shape[-2:]).mT
    axes = score_axes.stand_in(len(left), left.shape[1], right.shape[2])
    if axes is None:
        return None
    masks: dict[str, Any] = {name: _side_by_side(parts, name, dim) for name in ("hidden", "filled")}
    factor = _factors(parts, dim)
    whole = replace(first, left=left, right=right, factor=factor, axes=axes.view(shape), **masks)
    return replace(whole, before=None, log_over=None)


def _is_usual(axes: Tensor) -> bool:
    """Whether these are (…, queries, keys), of a product of queries and keys."""
    *others, queries, keys = (score_axes.origin(axes, axis) for axis in range(axes.dim()))
    batches = all(each in ("batch", None) for each in others)
    return batches and queries in ("left", None) and keys in ("right", None)


def _of_several_queries(parts: list[Scores], dim: int) -> bool:
    """Whether keys of different queries are put beside each other. Products may have the same queries in another form:
    in blocks beside a global part, say."""
    queries = []
    for part in parts:
        if part.axes is None or score_axes.origin(part.axes, dim) != "right":
            return False
        others = [axis for axis in range(part.axes.dim()) if axis != dim]
        queries.append(score_axes.taken(part.axes, part.left, "left", others))
    return not _equal(queries)


def _side_by_side(parts: list[Scores], name: str, dim: int | None, stacked: int = 0) -> Tensor | None:
    """The masks of several scores as one, beside each other along `dim`, or along a new axis `stacked`."""
    masks = [getattr(part, name) for part in parts]
    if not any(mask is not None for mask in masks):
        return None
    nothing = torch.zeros((), dtype=torch.bool, device=parts[0].left.device)
    shapes = [part.axes.shape for part in parts if part.axes is not None]
    each = [(nothing if m is None else m).expand(s) for m, s in zip(masks, shapes, strict=True)]
    return torch.stack(each, stacked) if dim is None else torch.cat(each, dim)


def _padded(mask: Tensor | None, dim: int, first: int) -> Tensor | None:
    """A mask with a column beside it that hides nothing."""
    if mask is None:
        return None
    column = torch.zeros_like(mask.narrow(dim, 0, 1))
    return torch.cat([column, mask] if first else [mask, column], dim)
