"""From memory and options to parts of a problem that are small enough to be computed at once.

A part is some batch rows of all heads, or some heads of a batch row, or some query rows of the heads of one kv head.
How many rows depends on T, S and the heads of a group alone, so that a batch row or a kv head alone has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from levelhead import reference
from levelhead.call.options import BATCH, HEADS, TOKENS, Scoring, Shape, fields
from levelhead.call.segments import positions
from levelhead.call.shapes import shape_of
from levelhead.errors import LevelheadTypeError, LevelheadValueError
from levelhead.numpy_core import additive

Array: TypeAlias = NDArray[Any]
Work = TypeVar("Work")
Found = TypeVar("Found")

_NUMBERS = 2**18  # logits of a part, in each of some ten arrays: they stay in a core's cache
_OWN = ("additive", "first_head", "query_runs", "key_runs")  # options of the core that `Scoring` does not have


@dataclass(frozen=True, slots=True)
class Part:
    """Some batch rows, heads and query rows of a problem, as `reference` takes a call; batch is (b,)."""

    q: Array  # (b, h, t, D)
    k: Array
    v: Array | None
    real: np.dtype[Any]  # of states
    shape: Shape
    scoring: Scoring
    index: Array  # (t,) in the sequence of queries
    j: Array  # (S,) positions of keys
    weights: Array | None  # of additive attention
    place: tuple[Any, ...]  # of its query rows in (batch, H, T, ...)
    tokens: tuple[Any, ...]  # of its queries in (batch, 1, T, ...)
    keys: tuple[Any, ...]  # of its keys in (batch, G, S, ...)
    heads: slice
    first: tuple[int, int]  # the numbers of its first batch row and head

    def logits(self) -> Array:
        """(b, h, t, S) in float64; -inf where a key is hidden. A product beyond the type of states is infinite, and one
        of -inf hides its key, as in every core."""
        if self.weights is None:
            scores = reference.products(self.q, self.k, self.shape, self.scoring)
        else:
            scores = additive.scores(self.q, reference.spread_heads(self.k, self.shape), self.weights)
        mask = self.scoring.mask
        wide = mask if mask is None or mask.dtype == np.bool_ else reference.wide(mask)
        scores = scores.astype(self.real, copy=False)
        found: Array = reference.score(self.scoring._replace(mask=wide), scores, self.index, self.j)
        return found

    def kept(self) -> Array | float:
        """What dropout multiplies each weight with, (b, h, t, S); 1 without."""
        s = self.scoring
        if not s.dropout:
            return 1.0
        p = np.broadcast_to(s.positions(self.index), (self.shape.B, self.shape.T))
        return reference.dropout_keep(s.seed or 0, s.dropout, self.shape.H, p, self.j, self.first) / (1.0 - s.dropout)

    def exists(self) -> Array | None:
        """Which of its query rows exist, (b, 1, t); None: all."""
        found: Array | None = self.scoring.existing_rows(self.shape, self.index)
        return found


class Problem:
    """A call of the core: arrays of any strides, options by the names of `_core.pyi`."""

    def __init__(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> None:
        unknown = options.keys() - {*Scoring._fields, *_OWN}
        if unknown or "scale" not in options:
            raise LevelheadTypeError(f"options that the core does not know, or no scale: {sorted(unknown)}")
        q, k, v = np.asarray(q), np.asarray(k), None if v is None else np.asarray(v)
        self.shape = shape_of(q.shape, k.shape, None if v is None else v.shape)
        self.real = np.dtype(np.float64 if q.dtype == np.float64 else np.float32)  # states are in it
        self.q, self.k, self.v = four(q), four(k), None if v is None else four(v)
        shape, batch = self.shape, self.shape.batch or (1,)
        given = {name: x for name, x in options.items() if name not in _OWN and x is not None}
        for name in given.keys() & {*fields(HEADS)}:
            given[name] = agreed(name, given[name], (shape.H,), np.float64)
        for name in given.keys() & {*fields(BATCH, TOKENS)}:
            tokens = {"query_segments": (shape.T,), "key_segments": (shape.S,)}.get(name, ())
            given[name] = agreed(name, given[name], (shape.B, *tokens), np.int64).reshape(*batch, *tokens)
        if "mask" in given:
            given["mask"] = four(agreed("mask", given["mask"], (*q.shape[:-1], shape.S)))
        self.scoring = Scoring(**given)
        runs = ((options.get("query_runs"), shape.T), (options.get("key_runs"), shape.S))
        self.index, self.j = (positions([(0, n, 1)] if given is None else given) for given, n in runs)
        if (len(self.index), len(self.j)) != (shape.T, shape.S):
            raise LevelheadValueError("runs: the lengths do not add up to the number of tokens")
        weights = options.get("additive")
        self.weights = None if weights is None else agreed("additive", weights, (shape.D,), self.real)
        self.first_head = options.get("first_head") or 0

    def per_row(self, name: str, x: Any, width: int | None = None, dtype: Any = None) -> Array:
        """An array of one number, or `width` of them, for each query row, (batch, H, T, width)."""
        rows = (*self.shape.lead, self.shape.T)
        if width is None:
            return four(agreed(name, x, rows, dtype)[..., None])
        return four(agreed(name, x, (*rows, width), dtype))

    def parts(self) -> Iterator[Part]:
        """In order: batch rows, kv heads, query rows."""
        shape, batch = self.shape, self.shape.batch or (1,)
        each = shape.H // max(shape.G, 1)
        row = max(each * shape.S * (1 if self.weights is None else shape.D), 1)
        rows = min(max(_NUMBERS // row, 1), shape.T)
        heads = max(_NUMBERS // (row * max(shape.T, 1)), 1)
        rows_of_batch = max(heads // max(shape.G, 1), 1)
        for lead in np.ndindex(batch[:-1]):
            for b, g, t in product(_slices(batch[-1], rows_of_batch), _slices(shape.G, heads), _slices(shape.T, rows)):
                yield self._part(lead, b, g, slice(g.start * each, g.stop * each), t)

    def _part(self, lead: tuple[int, ...], b: slice, g: slice, h: slice, t: slice) -> Part:
        rows: tuple[Any, ...] = (*lead, b)
        place, tokens, keys = (*rows, h, t), (*rows, slice(None), t), (*rows, g)
        q, k, v = self.q[place], self.k[keys], None if self.v is None else self.v[keys]
        where: dict[str, Any] = dict.fromkeys(fields(HEADS), h) | dict.fromkeys((*fields(BATCH), "key_segments"), rows)
        where |= {"query_segments": (*rows, t), "mask": place}
        chosen = {name: x[where[name]] for name in where if (x := getattr(self.scoring, name)) is not None}
        number = int(np.ravel_multi_index((*lead, b.start), self.shape.batch or (1,)))
        return Part(
            q,
            k,
            v,
            real=self.real,
            shape=shape_of(q.shape, k.shape, None if v is None else v.shape),
            scoring=self.scoring._replace(**chosen),
            index=self.index[t],
            j=self.j,
            weights=self.weights,
            place=place,
            tokens=tokens,
            keys=keys,
            heads=h,
            first=(number, self.first_head + h.start),
        )


def agreed(name: str, x: Any, shape: tuple[int, ...], dtype: Any = None) -> Array:
    """An array of the agreed shape and type, or an error that names it."""
    array = np.asarray(x)
    if array.shape != shape or (dtype is not None and array.dtype != dtype):
        wanted = f"shape {shape}" + (f" and dtype {np.dtype(dtype)}" if dtype else "")
        raise LevelheadValueError(f"{name}: not an array of the agreed {wanted}, but {array.shape} {array.dtype}")
    return array


def four(x: Array) -> Array:
    """A view of (T, D) or (H, T, D) as one batch row."""
    return x[(None,) * max(4 - x.ndim, 0)]


def dealt(work: Callable[[Work], Found], parts: Iterable[Work], threads: int) -> Iterator[Found]:
    """What each part's work gives, in order, on so many threads. No part depends on another."""
    parts = list(parts)
    team = min(threads, len(parts))
    if team > 1:
        with ThreadPoolExecutor(team) as pool:
            try:
                begun = pool.map(work, parts)
            except RuntimeError:  # no thread can be started: a limit, a platform without, an interpreter that ends
                pool.shutdown(cancel_futures=True)
            else:
                yield from begun
                return
    yield from map(work, parts)


def _slices(count: int, step: int) -> list[slice]:
    return [slice(i, min(i + step, count)) for i in range(0, count, step)] if count else []
