"""A `score_mod` of flex_attention that scales the logits once more: how much of a change of a score it passes on."""

from __future__ import annotations

import torch
from torch import Tensor

from levelhead.watching.described import Call
from levelhead.watching.mask_functions import scored, visible

_SAME = 5e-3  # relative: slopes that differ by less are the same
_SCORE = 0.25  # a small score, where a soft cap is still a line
_PLACES = 48  # queries, and keys, at which it is evaluated


def through(call: Call, factor: float | Tensor | None) -> float | Tensor | None:
    """The factor of a call's logits after its `score_mod`; NaN for a head that has no such number. It stays on the
    device: nobody waits for it."""
    if call.score_mod is None or factor is None:
        return factor
    B, H = call.q.shape[:2]
    i, j = (_some(n, call.q.device) for n in (call.q.shape[2], call.k.shape[2]))
    still = torch.zeros((B, H, len(i), len(j)), device=call.q.device)
    low, high = (scored(call.score_mod, still + x, i, j) for x in (-_SCORE, _SCORE))
    slopes = (high - low) / (2 * _SCORE)
    counts = slopes.isfinite()  # what it hides is -inf in both
    if call.mask_mod is not None:
        counts = counts & visible(call.mask_mod, torch.arange(B, device=i.device), H, i, j)
    first, last = (_each_head(slopes, counts, x) for x in ("amin", "amax"))
    own = (first + last) / 2
    own = torch.where((own - 1).abs() < _SAME, 1.0, own)
    return factor * torch.where((last - first) <= _SAME * last.abs(), own, torch.nan)


def _some(n: int, device: torch.device) -> Tensor:
    """Places from the first to the last."""
    return torch.linspace(0, n - 1, min(n, _PLACES), device=device).round().long()


def _each_head(slopes: Tensor, counts: Tensor, extreme: str) -> Tensor:
    """The smallest or largest slope of each head, (H,)."""
    nothing = torch.inf if extreme == "amin" else -torch.inf
    found: Tensor = getattr(slopes.masked_fill(~counts, nothing), extreme)((0, 2, 3))
    return found
