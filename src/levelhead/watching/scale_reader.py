"""Reads the effective scale of a call, head by head, from what ran before it.

At the call a sample of the tokens of q and k is taken (`note`); when the step is read, their origins are looked for
among the layers' outputs, and the factors on the way are multiplied. What cannot be known has a reason instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from levelhead.watching import origins, sampled
from levelhead.watching.effective_scale import Ran, role
from levelhead.watching.origins import Floats, Origin
from levelhead.watching.sampled import Aligned, Views
from levelhead.watching.scale_sides import NORMALISED, Reading, Side, combined, judged

LARGEST = 1 << 16  # columns; a wider output is a vocabulary's
# Of a head's width, which its first part may have, in twelfths. A third of a width that has none would be an odd number
# of columns, which may begin at every column of a layer: a long search for what no model has.
_SHARES = (6, 8, 4, 9, 3)
_REMEMBERED = 256  # circumstances in which no origin was found


class Noted(NamedTuple):
    """What a reading needs of a call."""

    ran: list[Ran]
    q: Views
    k: Views
    scale: float | Tensor | None  # passed, or one for each head; None: not known
    heads: int
    splits: tuple[int, ...]
    cached: bool  # there are more keys than any layer put out
    by_function: bool = False  # the scale is that after a `score_mod`


def note(ran: Sequence[Ran], q: Tensor, k: Tensor, scale: float | Tensor | None, splits: Sequence[int]) -> Noted | None:
    """Of queries (B, H, T, D) and keys; `splits`: widths of a first part that the model's configuration names."""
    used = [one for one in ran if (one.norm or one.reads is not None) and one.rows.shape[1] <= LARGEST]
    if not used or not q.numel() or not k.numel():
        return None
    counts = {one.tokens for one in used}
    cached = k.shape[0] * k.shape[2] > max(counts)
    D = q.shape[3]
    tried = (*(at for at in splits if 0 < at < D), *(D * n // 12 for n in _SHARES if n % 3 == 0 or D % 3 == 0))
    return Noted(used, sampled.views(q, counts), sampled.views(k, counts), scale, q.shape[1], tried, cached)


class _Known(NamedTuple):
    """Where heads came from last time: tried first."""

    aligned: Aligned
    names: tuple[str, ...]
    found: list[Origin | None]


class _NotFound:
    """What was said of heads whose origin was not found. The search takes long: it is repeated at the 2nd, 4th, 8th …
    reading under the same circumstances."""

    def __init__(self) -> None:
        self.readings = 0
        self.side, self.at = Side(""), 0

    def said(self, side: Side, at: int) -> Side:
        """`at`: of the orders of tokens, the one that was judged."""
        self.side, self.at = side, at
        return side

    def holds(self, tried: Sequence[_Try]) -> bool:
        """At one more reading."""
        self.readings += 1
        heads = tried[self.at].heads
        changed = self.side.how == NORMALISED and not all(origins.steady(heads[:, h]) for h in range(heads.shape[1]))
        return self.readings & (self.readings - 1) != 0 and not changed


class _Try(NamedTuple):
    """Queries or keys beside the layers with as many tokens, in one order of the tokens."""

    aligned: Aligned
    heads: Floats
    layers: list[Ran]
    outputs: list[Floats]

    @classmethod
    def of(cls, aligned: Aligned, view: Tensor, ran: Sequence[Ran]) -> _Try:
        layers = [one for one in ran if one.tokens == aligned.tokens]
        return cls(aligned, _numbers(view), layers, [_numbers(one.rows)[slice(*aligned.samples)] for one in layers])

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.layers)


class Reader:
    """Of one module, step after step."""

    def __init__(self) -> None:
        self._known: dict[Any, _Known] = {}
        self._not_found: dict[Any, _NotFound] = {}

    def read(self, noted: Noted, number: int = 1) -> Reading:
        """The effective scale of a call, the how many-th of its pass."""
        sides = ("queries", noted.q), ("keys", noted.k)
        q, k = (self._side(name, views, noted, number) for name, views in sides)
        passed = None if noted.scale is None else _each(noted.scale)
        return combined(q, k, passed, noted.heads, cached=noted.cached, by_function=noted.by_function)

    def _side(self, name: str, views: Views, noted: Noted, number: int) -> Side:
        if not views:
            return Side(f"no layer before the call has the tokens of the {name}")
        tried = [_Try.of(aligned, view, noted.ran) for aligned, view in views.items()]
        for one in tried:
            known = self._known.get((name, number, one.heads.shape))
            same = known is not None and known[:2] == (one.aligned, one.names)
            if known is not None and same and origins.still(one.heads, one.outputs, known.found):
                return judged(name, one.heads, one.layers, one.outputs, known.found)
        circumstances = (name, number, *((one.aligned, one.names, one.heads.shape) for one in tried))
        if len(self._not_found) >= _REMEMBERED:
            self._not_found.clear()
        before = self._not_found.setdefault(circumstances, _NotFound())
        if before.holds(tried):
            return before.side
        founds: list[list[Origin | None]] = [[] for _ in tried]
        for splits in (None, noted.splits):  # whole heads in every order first: parts are many
            for one, found in zip(tried, founds, strict=True):
                named = [n for n, layer in enumerate(one.layers) if name[0] in (role(layer.name) or "")]
                if splits is None:
                    found += origins.find(one.heads, one.outputs, named)
                else:
                    origins.find_parts(found, one.heads, one.outputs, splits, named)
                if None not in found:
                    self._known[name, number, one.heads.shape] = _Known(one.aligned, one.names, found)
                    del self._not_found[circumstances]
                    return judged(name, one.heads, one.layers, one.outputs, found)
        at = min(range(len(tried)), key=lambda n: founds[n].count(None))
        return before.said(judged(name, tried[at].heads, tried[at].layers, tried[at].outputs, founds[at]), at)


def _numbers(x: Tensor) -> Floats:
    """Waits for the device: for when a step is read."""
    return x.detach().to("cpu", torch.float64).numpy()


def _each(scale: float | Tensor) -> Floats:
    return _numbers(scale).reshape(-1) if isinstance(scale, Tensor) else np.array([scale], np.float64)
