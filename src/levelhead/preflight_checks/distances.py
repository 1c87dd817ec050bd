"""The sign of a bias that grows with the distance (ALiBi): far keys must lose, not win."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from levelhead.preflight_checks.calls import SeenCall
from levelhead.preflight_checks.flight import Flight
from levelhead.preflight_checks.result import finding
from levelhead.runs.record import Run

_NEAR = 1e-3


def check(flight: Flight, run: Run, calls: Sequence[SeenCall]) -> None:
    """Fits a line to the bias of every head."""
    name, changed = "ALiBi's sign", "the part of the logits that is not the product"
    scales = {record.module: record.facts.scale for record in run.latest}
    slopes = {call.module: _slopes(call, scales.get(call.module)) for call in calls if call.square}
    lines = {module: s for module, s in slopes.items() if s is not None and 2 * int((s.abs() > _NEAR).sum()) > len(s)}
    found = []
    for module, s in lines.items():
        if bool((s > -_NEAR).all()) and float(s.max()) > _NEAR:
            why = "The bias grows with the distance: far keys are preferred to near ones. ALiBi subtracts slope × "
            why += "distance."
            advice = "Change the sign of the bias, or of the positions' difference."
            found.append(finding("ALiBi's sign", "error", module, why, advice, slope=float(s.max())))
        elif _reversed(-s):
            why = (
                "The slopes are those of ALiBi in the reverse order: the first head has the smallest. Weights of other "
            )
            why += "code do not fit."
            advice = "Give head h (from 0) the slope 2^(-8 (h + 1) / heads)."
            found.append(finding("ALiBi's slopes", "warning", module, why, advice, first_slope=-float(s[0])))
    if found:
        return flight.failed(name, changed, ", ".join(sorted({f.kind for f in found})), *found)
    if not lines:
        return flight.unknown(name, changed, "no bias that is a line in the distance")
    return flight.passed(name, changed, f"{len(lines)} modules prefer near keys")


def _reversed(slopes: Tensor) -> bool:
    usual = 2.0 ** (-8.0 * torch.arange(1, len(slopes) + 1).to(slopes) / len(slopes))
    return len(slopes) > 2 and bool(torch.allclose(slopes, usual.flip(0), rtol=0.02, atol=1e-5))


def _slopes(call: SeenCall, scale: float | None) -> Tensor | None:
    """(H,): how much the bias grows for every key further back; None: it is no line."""
    bias = _bias(call, scale)
    if bias is None:
        return None
    T = bias.shape[-1]
    i, j = torch.arange(T, device=bias.device)[:, None], torch.arange(T, device=bias.device)[None]
    past = (j <= i) & (i > 1)
    if not bool(torch.isfinite(bias[..., past]).all()):
        return None
    own = bias.diagonal(dim1=-2, dim2=-1)[..., None]
    gain = bias - own  # 0 at the key of the query itself
    slope = gain[:, :, 2:, :-1].diagonal(offset=1, dim1=-2, dim2=-1).mean((0, -1))  # one key back
    gap = (gain - slope[None, :, None, None] * (i - j)).masked_fill(~past, 0.0).abs().amax((0, 2, 3))
    size = gain.masked_fill(~past, 0.0).abs().amax((0, 2, 3))
    return slope if bool((gap <= 0.02 * size + 1e-5).all()) else None


def _bias(call: SeenCall, scale: float | None) -> Tensor | None:
    """(B, H, T, T) or what broadcasts to it, without what is hidden."""
    scoring = call.call.scoring
    if not call.call.ready:
        mask = scoring.mask
        return None if mask is None or not mask.is_floating_point() or mask.dim() < 3 else _four(mask.double(), call)
    if scale is None or call.logits is None or not call.whole:
        return None
    groups = call.q.shape[1] // call.k.shape[1]
    products = call.q.double() @ call.k.double().repeat_interleave(groups, 1).mT
    return call.logits.double() - products * scale


def _four(mask: Tensor, call: SeenCall) -> Tensor:
    return mask.expand(*call.call.q.shape[:3], call.keys).double()
