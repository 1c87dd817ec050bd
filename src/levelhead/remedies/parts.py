"""Heads in two parts, as in multi-head latent attention (MLA): a part with keys of its own, and one with positions.

All heads share the keys of the second part (k_rope), so no head's factor may go there. Which columns are shared is read
off the keys themselves; names of widths help only where there is a single head. Each part is then compared with the
projections by itself: a position's scaling (YaRN) may differ from the rest, and parts may come from two projections.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from levelhead.remedies.projections import Parts, RanProjection, Source, source
from levelhead.watching import effective_scale


def in_parts(module: nn.Module, ran: Sequence[RanProjection], q: Tensor, k: Tensor) -> Parts | None:
    """Both parts of a module's heads and where they come from; None: there are none, or not all sources are known."""
    if q.shape[-1] != k.shape[-1]:
        return None
    for own, shared in _splits(module, k):
        q_own, q_shared = (source("q", module, ran, q[..., part], part=True) for part in (own, shared))
        k_own = source("k", module, ran, k[..., own], part=True)
        if not (isinstance(q_own, Source) and isinstance(q_shared, Source) and isinstance(k_own, Source)):
            continue
        if not (q_own.shared(q.shape[1]) or k_own.shared(q.shape[1])):
            return Parts(own, shared, q_own, q_shared, k_own)
    return None


def _splits(module: nn.Module, k: Tensor) -> list[tuple[slice, slice]]:
    """Where a head's width divides: its own columns, those that all heads share."""
    D = k.shape[-1]
    if k.shape[1] == 1:
        return [(slice(0, at), slice(at, D)) for at in effective_scale.parts_named(module)[:1] if 0 < at < D]
    shared = (k == k[:, :1]).flatten(0, 2).all(0).tolist()
    count = sum(shared)
    if 0 < count < D and all(shared[-count:]):
        return [(slice(0, D - count), slice(D - count, D))]
    if 0 < count < D and all(shared[:count]):
        return [(slice(count, D), slice(0, count))]
    return []
