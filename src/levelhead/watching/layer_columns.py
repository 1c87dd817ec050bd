"""Which axes of a tensor hold the columns that a layer put out, however it was reshaped.

A softmax over columns is a classifier, a router or a gate. A softmax over another axis, whose weights are then applied
to something, is attention, although its logits may be no product of queries and keys.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from levelhead.watching.scores import VIEWS

Columns: TypeAlias = tuple[bool, ...]  # for every axis

_REDUCTIONS = {"sum", "mean", "amax", "amin", "max", "min", "logsumexp", "prod", "linalg_vector_norm", "norm"}
_JOINS = {"cat", "stack"}
_FEWER = {"gather", "index_select", "constant_pad_nd", "index", "masked_select"}  # or more entries along an axis
_DISTANCES = {"_cdist_forward", "_euclidean_dist"}


def of_product(shape: Sequence[int], axis: int) -> Columns:
    """Fresh from a product with a parameter, whose columns are along `axis`."""
    place = axis % len(shape) if shape else 0
    return tuple(n == place for n in range(len(shape)))


def after(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], known: list[Any], out: Any) -> Any:
    """The columns in `out`: one tuple, a list of them for several outputs, or None; `known`: those of the tensors among
    the arguments (of the list that is joined), None elsewhere."""
    place = next(n for n, x in enumerate(known) if x is not None)
    mine: Columns = known[place]
    if name in VIEWS:
        return _viewed(func, args, kwargs, mine, out)
    if name in _JOINS:
        return _joined(name, args, mine, out)
    if name in _DISTANCES:
        return None
    if isinstance(out, list | tuple) or name in _FEWER:
        each = [_kept(mine, args[place], x) for x in _list(out)]
        return each if isinstance(out, list | tuple) else each[0]
    if name in _REDUCTIONS and isinstance(out, Tensor) and out.dim() < args[place].dim():
        return _reduced(mine, args, out)
    inputs = [(x, columns) for x, columns in zip(args, known, strict=False) if columns is not None]
    found = [columns for x, own in inputs if (columns := _placed(own, x, out)) is not None]
    return tuple(map(any, zip(*found, strict=True))) if found else None


def in_both(name: str, known: Sequence[Any], args: tuple[Any, ...], out: Any) -> Columns | None:
    """Which axes of a product entry by entry are columns of both factors; None: it is none."""
    if name not in ("mul", "mul_") or len(known) < 2 or known[0] is None or known[1] is None:
        return None
    a, b = (_placed(columns, x, out) for columns, x in zip(known[:2], args, strict=False))
    return None if a is None or b is None else tuple(x and y for x, y in zip(a, b, strict=True))


def summed(both: Columns, mine: Columns, args: tuple[Any, ...], out: Any) -> Columns | None:
    """The columns of a sum over an axis of a product entry by entry with the columns `mine`, of which `both` are those
    of both factors. Summed over such an axis, it is a score of a query and a key, and none of its axes is a layer's."""
    kept, scores = _reduced(mine, args, out), _reduced(both, args, out)
    over = [both[d % len(both)] for d in args[1]] if len(args) > 1 and isinstance(args[1], list | tuple) else []
    if kept is None or scores is None or not any(over):
        return kept
    return tuple(x and not y for x, y in zip(kept, scores, strict=True))


def _viewed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mine: Columns, out: Any) -> Any:
    shape = args[0].shape
    how = tuple(tuple(x) if isinstance(x, list) else x for x in args[1:])
    seen = _view_of(func, tuple(shape), mine, how, tuple(kwargs.items()))
    if seen is None:
        return _trailing(shape[-1], out.shape) if isinstance(out, Tensor) and mine and mine[-1] else None
    return seen


@functools.lru_cache(maxsize=1024)
def _view_of(func: Any, shape: tuple[int, ...], mine: Columns, args: tuple[Any, ...], kwargs: tuple[Any, ...]) -> Any:
    """The columns after a view of this shape; None: columns and other entries became one axis."""
    stand = torch.empty_strided(shape, [int(x) for x in mine], dtype=torch.uint8, device="meta")
    try:
        seen = func(stand, *args, **dict(kwargs))
    except RuntimeError:
        return None
    each = [tuple(s != 0 and n > 1 for s, n in zip(x.stride(), x.shape, strict=True)) for x in _list(seen)]
    return each if isinstance(seen, list | tuple) else each[0]


def _trailing(columns: int, shape: Sequence[int]) -> Columns:
    """Where the columns of a last axis are after a reshape: the last axes that divide them."""
    found, size = [], 1
    for n in reversed(shape):
        size *= n
        found.append(columns % size == 0 and n > 1 and size <= columns)
    return tuple(reversed(found))


def _joined(name: str, args: tuple[Any, ...], mine: Columns, out: Tensor) -> Columns:
    """Outputs of several layers beside each other are columns, too; single numbers are not, as a score for each key."""
    dim = (args[1] if len(args) > 1 else 0) % out.dim()
    inner = (*mine[:dim], True, *mine[dim:]) if name == "stack" else mine
    if len(inner) != out.dim():
        return of_product(out.shape, dim)
    return tuple(any(mine) if n == dim else x for n, x in enumerate(inner))


def _reduced(mine: Columns, args: tuple[Any, ...], out: Tensor) -> Columns | None:
    dims = args[1] if len(args) > 1 else None
    dims = [dims] if isinstance(dims, int) else dims
    if not isinstance(dims, list | tuple) or not all(isinstance(d, int) for d in dims):
        return None
    gone = {d % len(mine) for d in dims}
    kept = tuple(x for n, x in enumerate(mine) if n not in gone)
    return kept if len(kept) == out.dim() else None


def _placed(mine: Columns, x: Any, out: Any) -> Columns | None:
    """Where they are in a result that was computed entry by entry."""
    if not isinstance(out, Tensor) or not isinstance(x, Tensor) or not out.is_floating_point():
        return None
    more = out.dim() - x.dim()
    padded, sizes = (False,) * more + mine, (1,) * more + tuple(x.shape)
    if more < 0 or any(n not in (1, m) for n, m in zip(sizes, out.shape, strict=True)):
        return None
    return tuple(c and not (n == 1 and m > 1) for c, n, m in zip(padded, sizes, out.shape, strict=True))


def _kept(mine: Columns, x: Any, out: Any) -> Columns | None:
    """Where they are in a result with the same axes and perhaps fewer entries, or with fewer axes before the last."""
    if not isinstance(out, Tensor) or not isinstance(x, Tensor) or not out.is_floating_point() or not out.dim():
        return None
    return mine if out.dim() == x.dim() else of_product(out.shape, -1) if mine[-1] else None


def _list(x: Any) -> list[Any]:
    return list(x) if isinstance(x, list | tuple) else [x]
