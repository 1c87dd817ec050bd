"""The scale of every head, from the logits of queries with their own keys and the projections' outputs.

For a query and the key of the same token a rotation changes nothing, and ALiBi adds nothing: their logits are the scale
times the product of the projections, plus at most a constant. Where that line does not fit, nothing is said.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from levelhead.diagnosis.findings import Finding, worst_heads
from levelhead.preflight_checks.calls import SeenCall
from levelhead.preflight_checks.flight import Flight
from levelhead.preflight_checks.passes import Tape
from levelhead.preflight_checks.result import finding
from levelhead.watching import effective_scale

_NEAR, _FAR = 1.03, 1.3  # own: factors; heads with the right scale, and heads that clearly have another
_FITS = 1e-3  # of the spread of the logits


def check(flight: Flight, calls: Sequence[SeenCall]) -> None:
    """Finds heads whose scale differs from 1/√d_k in modules where most heads have it."""
    name, looked = "scale of each head", "logits of tokens with themselves, against the projections"
    known, found = 0, []
    for call in calls:
        scales = of_heads(call, flight.tape)
        if scales is None:
            continue
        known += 1
        found += list(_odd(call, scales))
    if found:
        return flight.failed(name, looked, f"{len(found)} modules have heads with another scale", *found)
    if not known:
        return flight.unknown(name, looked, "no module whose logits are a line in the product of its projections")
    return flight.passed(name, looked, f"no head of {known} modules differs from the others")


def _odd(call: SeenCall, scales: Tensor) -> Iterator[Finding]:
    right = call.q.shape[3] ** -0.5
    ratios = (scales / right).tolist()
    fine = [h for h, r in enumerate(ratios) if r > 0 and abs(math.log(r)) < math.log(_NEAR)]
    odd = [h for h, r in enumerate(ratios) if r <= 0 or abs(math.log(r)) > math.log(_FAR)]
    if odd and len(fine) > len(ratios) // 2:
        worst = max((ratios[h] for h in odd), key=lambda r: abs(math.log(max(r, 1e-9))))
        why = "Most heads of this module scale by 1/√d_k, and these do not."
        advice = "Apply one scale to the logits of all heads."
        yield finding("wrong scale of a head", "warning", call.module, why, advice, worst_heads(odd), ratio=worst)


def of_heads(call: SeenCall, tape: Tape) -> Tensor | None:
    """(H,): the slope of the line, by head; None: it is no line, or the projections are not known."""
    both = projected(call, tape)
    hidden = call.hidden()
    if both is None or call.logits is None or hidden is None or not call.square:
        return None
    q, k = both
    x = (q * k).sum(-1).transpose(0, 1).flatten(1)  # (H, B · T)
    y = call.logits.double().diagonal(dim1=-2, dim2=-1).transpose(0, 1).flatten(1)
    if bool(hidden.diagonal(dim1=-2, dim2=-1).any()) or not bool(torch.isfinite(x + y).all()) or x.shape[1] < 6:
        return None
    dx, dy = x - x.mean(1, keepdim=True), y - y.mean(1, keepdim=True)
    slope = (dx * dy).sum(1) / dx.square().sum(1).clamp(min=1e-30)
    gap = (dy - slope[:, None] * dx).norm(dim=1) / dy.norm(dim=1).clamp(min=1e-30)
    return slope if bool((gap < _FITS).all()) else None


def projected(call: SeenCall, tape: Tape) -> tuple[Tensor, Tensor] | None:
    """What the projections of q and k gave, (B, H, T, D) each."""
    B, H, T = call.call.q.shape[:3]
    D = call.q.shape[3]
    prefix = f"{call.module}." if call.module else ""
    found: dict[str, Tensor] = {}
    for (name, number), entry in tape.entries.items():
        role = effective_scale.role(name)
        own = name.startswith(prefix) and "." not in name[len(prefix) :] and number == 0
        if own and role in ("q", "k", "qkv") and entry.outputs:
            found[role] = entry.outputs[0].double()
    if "qkv" in found and found["qkv"].shape[-1] == 3 * H * D:
        found["q"], found["k"], _ = found["qkv"].chunk(3, -1)
    if not {"q", "k"} <= found.keys() or any(found[x].dim() != 3 or found[x].shape[:2] != (B, T) for x in "qk"):
        return None
    q, k = found["q"], found["k"]
    if q.shape[-1] != H * D or k.shape[-1] % D or H % (k.shape[-1] // D):
        return None
    heads = [x.reshape(B, T, -1, D).transpose(1, 2) for x in (q, k)]
    return heads[0], heads[1].repeat_interleave(H // heads[1].shape[1], 1)
