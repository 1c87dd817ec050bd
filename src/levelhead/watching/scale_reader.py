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
from levelhead.watching.effective_scale import BY_TOKEN, FROM_PROJECTIONS, NORMALISED, Ran, Reading, role
from levelhead.watching.origins import Floats, Origin
from levelhead.watching.sampled import Aligned, Views

LARGEST = 1 << 16  # columns; a wider output is a vocabulary's
_SHARES = (1 / 2, 2 / 3, 1 / 3, 3 / 4, 1 / 4)  # of a head's width, which its first part may have
ALIKE = 1e-3  # heads whose scales differ less have the same


class Noted(NamedTuple):
    """What a reading needs of a call."""

    ran: list[Ran]
    q: Views
    k: Views
    scale: float | Tensor | None  # passed, or one for each head; None: not known
    heads: int
    splits: tuple[int, ...]
    cached: bool  # there are more keys than any layer put out


def note(ran: Sequence[Ran], q: Tensor, k: Tensor, scale: float | Tensor | None, splits: Sequence[int]) -> Noted | None:
    """Of queries (B, H, T, D) and keys; `splits`: widths of a first part that the model's configuration names."""
    used = [one for one in ran if (one.norm or one.reads is not None) and one.rows.shape[1] <= LARGEST]
    if not used or not q.numel() or not k.numel():
        return None
    counts = {one.tokens for one in used}
    cached = k.shape[0] * k.shape[2] > max(counts)
    D = q.shape[3]
    tried = (*(at for at in splits if 0 < at < D), *(int(D * share) for share in _SHARES))
    return Noted(used, sampled.views(q, counts), sampled.views(k, counts), scale, q.shape[1], tried, cached)


class _Side(NamedTuple):
    """Queries or keys: their factors over their projections, (heads,), or why there are none."""

    how: str
    factors: Floats = np.ones(0)
    reads: int | None = None
    parts: tuple[int, ...] = ()


class _Known(NamedTuple):
    """Where heads came from last time: tried first."""

    aligned: Aligned
    names: tuple[str, ...]
    found: list[Origin | None]


class Reader:
    """Of one module, step after step."""

    def __init__(self) -> None:
        self._known: dict[Any, _Known] = {}

    def read(self, noted: Noted) -> Reading:
        """The effective scale of a call."""
        q, k = (self._side(name, views, noted) for name, views in (("queries", noted.q), ("keys", noted.k)))
        if NORMALISED in (q.how, k.how):
            return Reading(None, NORMALISED, q.reads)
        if q.how != FROM_PROJECTIONS:
            return Reading(None, q.how, q.reads)
        if k.how != FROM_PROJECTIONS:
            return Reading(None, "keys come from a cache" if noted.cached else k.how, q.reads)
        if noted.scale is None:
            return Reading(None, "the scale is not known", q.reads)
        passed, heads = _each(noted.scale), len(q.factors)
        if heads % len(k.factors) or heads % len(passed):
            return Reading(None, "heads of queries and keys do not go together", q.reads)
        each = q.factors * np.repeat(k.factors, heads // len(k.factors)) * np.repeat(passed, heads // len(passed))
        if not (np.isfinite(each).all() and (each > 0).all()):
            return Reading(None, "q, k or a projection's output is zero or not finite", q.reads)
        middle = float(np.sort(each)[heads // 2])
        differ = heads == noted.heads and bool((np.abs(each / middle - 1) > ALIKE).any())
        parts = max(q.parts, k.parts, key=len)
        return Reading(middle, FROM_PROJECTIONS, q.reads, tuple(map(float, each)) if differ else (), parts)

    def _side(self, name: str, views: Views, noted: Noted) -> _Side:
        if not views:
            return _Side(f"no layer before the call has the tokens of the {name}")
        best: tuple[int, Floats, list[Ran], list[Floats], list[Origin | None]] | None = None
        for aligned, view in views.items():
            layers = [one for one in noted.ran if one.tokens == aligned.tokens]
            heads, outputs = _numbers(view), [_numbers(one.rows)[slice(*aligned.samples)] for one in layers]
            names = tuple(one.name for one in layers)
            known = self._known.get((name, heads.shape))
            found: list[Origin | None]
            if known is not None and known[:2] == (aligned, names) and origins.still(heads, outputs, known.found):
                found = known.found
            else:
                named = [n for n, one in enumerate(layers) if name[0] in (role(one.name) or "")]
                found = origins.find(heads, outputs, noted.splits, named)
            matched = sum(origin is not None for origin in found)
            if best is None or matched > best[0]:
                best = matched, heads, layers, outputs, found
            if matched == len(found):
                self._known[name, heads.shape] = _Known(aligned, names, found)
                break
        assert best is not None
        return _judged(name, *best)


def _judged(
    name: str, matched: int, heads: Floats, layers: list[Ran], outputs: list[Floats], found: list[Origin | None]
) -> _Side:
    if matched < len(found):
        if all(origins.steady(heads[:, h]) for h, origin in enumerate(found) if origin is None):
            return _Side(NORMALISED)
        some = "some of " if matched else ""
        return _Side(f"the origin of {some}the {name} was not found among the layers before the call")
    known = [origin for origin in found if origin is not None]
    used = [layers[layer] for origin in known for layer in origin.layers]
    reads = used[0].reads
    if any(one.norm for one in used):
        return _Side(NORMALISED, reads=reads)
    factors = [origins.factor(heads[:, h], outputs, origin) for h, origin in enumerate(known)]
    if any(one.spread > origins.STEADY for one in factors):
        norms = [output for one, output in zip(layers, outputs, strict=True) if one.norm]
        normalised = all(origins.steady(heads[:, h]) for h in range(len(known))) or None not in origins.find(
            heads, norms
        )
        return _Side(NORMALISED if normalised else f"{name}: {BY_TOKEN}", reads=reads)
    parts = known[0].parts if len(known[0].parts) > 1 else ()
    return _Side(FROM_PROJECTIONS, np.array([one.factor for one in factors]), reads, parts)


def _numbers(x: Tensor) -> Floats:
    """Waits for the device: for when a step is read."""
    return x.detach().to("cpu", torch.float64).numpy()


def _each(scale: float | Tensor) -> Floats:
    return _numbers(scale).reshape(-1) if isinstance(scale, Tensor) else np.array([scale], np.float64)
