"""Whether something is added to the logits of a call: a clip scales products of q and k, and leaves the rest."""

from __future__ import annotations

import torch
from torch import Tensor

from levelhead.torch.masks import hides
from levelhead.watching.measure import Call

_ROWS = 256  # of queries, compared at most
_SAME = {torch.float64: 1e-6, torch.float32: 1e-3}  # of the largest score: what rounding leaves
_SAME_HALF = 5e-2


def added(call: Call, q: Tensor, k: Tensor) -> Tensor:
    """Whether a logit that is shown is more than a factor times q kᵀ."""
    mask: Tensor | None = call.scoring.mask
    if mask is None or mask.dtype is torch.bool:
        return torch.zeros((), dtype=torch.bool, device=call.q.device)
    if call.ready:
        return _remains(mask.detach(), q.detach(), k.detach())
    return ((mask != 0) & ~hides(mask)).any().detach()


def _remains(scores: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Whether scores (B, H, T, S) that were computed by hand are no multiple of q kᵀ, head by head."""
    B, H, T, S = scores.shape
    if q.shape[:3] != (B, H, T) or k.shape[0] != B or H % k.shape[1] or k.shape[2] != S:
        return torch.zeros((), dtype=torch.bool, device=scores.device)  # not followed: no rows are known either
    limit = _SAME.get(q.dtype, _SAME_HALF)
    rows = torch.linspace(0, T - 1, min(_ROWS, T), device=scores.device).long()
    some, shown = scores[:, :, rows], ~hides(scores[:, :, rows])
    exact = some.dtype
    keys = k.repeat_interleave(H // k.shape[1], 1).to(exact)
    product = (q[:, :, rows].to(exact) @ keys.mT).masked_fill(~shown, 0.0)
    some = some.masked_fill(~shown, 0.0)
    factor = (product * some).sum((0, 2, 3)) / product.square().sum((0, 2, 3)).clamp_min(torch.finfo(exact).tiny)
    off = (some - factor[:, None, None] * product).abs().amax((0, 2, 3))
    return (off > limit * some.abs().amax((0, 2, 3))).any()
