"""RoPE that is no rotation: its angles are laid out for other pairs of columns than it turns.

Columns are paired as halves (i with i + D/2) or as neighbours (2i with 2i + 1), and cos and sin must repeat in the same
layout. For every column and place q = c · x + s · (its partner) is fitted to the projections' outputs. A rotation has
one angle for both columns of a pair; with mixed layouts each column has an angle of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from levelhead.diagnosis.findings import Finding
from levelhead.preflight_checks.calls import SeenCall
from levelhead.preflight_checks.head_scales import projected
from levelhead.preflight_checks.passes import Tape
from levelhead.preflight_checks.result import finding

_FITS, _UNIT, _APART = 1e-3, 1e-2, 0.05
KIND = "RoPE pairs mixed"


def check(call: SeenCall, tape: Tape) -> Finding | None:
    """Of q or k whose length changes with the place."""
    both = projected(call, tape)
    if both is None or not call.whole:
        return None
    D, groups = call.q.shape[3], call.q.shape[1] // call.k.shape[1]
    k = call.k.double().repeat_interleave(groups, 1)
    for made, here, which in ((both[0], call.q.double(), "q"), (both[1], k, "k")):
        for partner, layout in ((_halves(D), "halves"), (_neighbours(D), "neighbours")):
            gap = _apart(made.double(), here, partner.to(made.device))
            if gap is not None and gap > _APART:
                why = f"RoPE pairs the columns of {which} as {layout}, and its cos and sin are laid out for another "
                why += "pairing: the two columns of a pair are turned by different angles, so that lengths change and "
                why += "products do not depend on the distance alone."
                advice = "For halves repeat the angles as cat((a, a)), for neighbours as repeat_interleave(a, 2)."
                return finding(KIND, "error", call.module, why, advice, difference=gap)
    return None


def _halves(D: int) -> Tensor:
    return (torch.arange(D) + D // 2) % D


def _neighbours(D: int) -> Tensor:
    return torch.arange(D) ^ 1


def _apart(x: Tensor, y: Tensor, partner: Tensor) -> float | None:
    """How far the angles of the columns of a pair differ at most, by their cos; None: y is no such map of x."""
    if x.shape != y.shape or x.shape[0] * x.shape[1] < 4 or x.shape[3] % 2:
        return None
    x, y = (z.movedim(2, 0).flatten(1, 2) for z in (x, y))  # (T, samples, D)
    other = x[..., partner]
    a, b, c = x.square().sum(1), (x * other).sum(1), other.square().sum(1)
    u, v = (x * y).sum(1), (other * y).sum(1)
    det = (a * c - b * b).clamp(min=1e-30)
    cos, sin = (c * u - b * v) / det, (a * v - b * u) / det  # (T, D)
    rest = (y - cos[:, None] * x - sin[:, None] * other).norm(dim=1) / y.norm(dim=1).clamp(min=1e-30)
    length = (cos.square() + sin.square()).sqrt()
    if float(rest.max()) > _FITS or float((length / length.mean() - 1).abs().max()) > _UNIT:
        return None
    return float((cos - cos[:, partner]).abs().max())
