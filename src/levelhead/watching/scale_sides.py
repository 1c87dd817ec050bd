"""The effective scale from the origins of queries and keys: what their heads say together. No framework.

The factors on the way from a layer's output to the logits are multiplied; what cannot be known has a reason instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from levelhead.watching import origins
from levelhead.watching.origins import Floats, Origin

FROM_PROJECTIONS, NORMALISED = "projections", "normalised"
BY_FUNCTION = "a score_mod changes it"
BY_TOKEN = "its factor differs from token to token"
ONE_TOKEN = "all tokens of the pass are alike, so a norm cannot be told from a factor"

ALIKE = 1e-3  # heads whose scales differ less have the same


class Reading(NamedTuple):
    """The effective scale, and how it was read."""

    scale: float | None
    how: str
    width: int | None = None  # what the q projection reads
    each: tuple[float, ...] = ()  # of every head
    parts: tuple[int, ...] = ()  # widths of the parts of a head, if keys come from several projections
    learned: str = ""  # the parameter that it is
    call: int = 0  # whose it is, of calls in one pass with different scales; 0: they have the same


class Side(NamedTuple):
    """Queries or keys: their factors over their projections, (heads,), or why there are none."""

    how: str
    factors: Floats = np.ones(0)
    reads: int | None = None
    parts: tuple[int, ...] = ()


def combined(
    q: Side, k: Side, passed: Floats | None, heads: int, *, cached: bool = False, by_function: bool = False
) -> Reading:
    """The effective scale of a call of so many heads; `passed`: with the call, one number or one per head."""
    if NORMALISED in (q.how, k.how):
        return Reading(None, NORMALISED, q.reads)
    if q.how != FROM_PROJECTIONS:
        return Reading(None, q.how, q.reads)
    if k.how != FROM_PROJECTIONS:
        return Reading(None, "keys come from a cache" if cached else k.how, q.reads)
    if passed is None:
        return Reading(None, "the scale is not known", q.reads)
    found = len(q.factors)
    if by_function and np.isnan(passed).any():
        return Reading(None, BY_FUNCTION, q.reads)
    if found % len(k.factors) or found % len(passed):
        return Reading(None, "heads of queries and keys do not go together", q.reads)
    each = q.factors * np.repeat(k.factors, found // len(k.factors)) * np.repeat(passed, found // len(passed))
    if not (np.isfinite(each).all() and (each > 0).all()):
        return Reading(None, "q, k or a projection's output is zero or not finite", q.reads)
    middle = float(np.sort(each)[found // 2])
    differ = found == heads and bool((np.abs(each / middle - 1) > ALIKE).any())
    parts = max(q.parts, k.parts, key=len)
    return Reading(middle, FROM_PROJECTIONS, q.reads, tuple(map(float, each)) if differ else (), parts)


def judged(
    name: str, heads: Floats, layers: Sequence[Any], outputs: Sequence[Floats], found: Sequence[Origin | None]
) -> Side:
    """What is known of queries or keys.

    Args:
        name: "queries" or "keys".
        heads: (n, H, D), at n tokens.
        layers: that ran before the call; each says by `norm` whether it normalises, by `reads` how wide its input is.
        outputs: theirs (n, F), at the same tokens.
        found: the origin of every head.
    """
    matched = sum(origin is not None for origin in found)
    if matched < len(found):
        if all(origins.steady(heads[:, h]) for h, origin in enumerate(found) if origin is None):
            return Side(NORMALISED)
        some = "some of " if matched else ""
        return Side(f"the origin of {some}the {name} was not found among the layers before the call")
    known = [origin for origin in found if origin is not None]
    used = [layers[layer] for origin in known for layer in origin.layers]
    reads = used[0].reads
    if any(one.norm for one in used):
        return Side(NORMALISED, reads=reads)
    factors = [origins.factor(heads[:, h], outputs, origin) for h, origin in enumerate(known)]
    if any(one.spread > origins.STEADY for one in factors):
        norms = [output for one, output in zip(layers, outputs, strict=True) if one.norm]
        steady = all(origins.steady(heads[:, h]) for h in range(len(known)))
        normalised = steady or None not in origins.find(heads, norms)
        return Side(NORMALISED if normalised else f"{name}: {BY_TOKEN}", reads=reads)
    alike = all(len(np.unique(outputs[layer], axis=0)) == 1 for origin in known for layer in origin.layers)
    if alike and any(abs(one.factor - 1) > ALIKE for one in factors):
        return Side(f"{name}: {ONE_TOKEN}", reads=reads)
    parts = known[0].parts if len(known[0].parts) > 1 else ()
    return Side(FROM_PROJECTIONS, np.array([one.factor for one in factors]), reads, parts)
