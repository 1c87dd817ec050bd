"""Attention weights, for callers that ask for them: output_attentions=True.

As eager attention gives them: (B, H, T, S) in the caller's type, with gradients. They are formed from queries and keys
beside the output, before dropout.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from levelhead.errors import bad_value


def weights(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    scale: float | tuple[float, ...] | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    cosine: bool = False,
    log_n: bool = False,
) -> Tensor:
    """softmax(q kᵀ · scale + mask), with a cap and sinks; 0 for a query that sees no key."""
    if cosine or log_n:
        raise bad_value("model", "no weights to be asked for", "output_attentions=True with a remedy", "undo() first")
    wide = torch.promote_types(q.dtype, torch.float32)
    H, G = q.shape[-3], k.shape[-3]
    k = k.repeat_interleave(H // G, -3) if H != G else k
    logits = torch.matmul(q.to(wide), k.to(wide).mT) * _factor(scale, q, wide)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    T, S = logits.shape[-2:]
    visible = _visible(mask, T, S, causal, q.device)
    if mask is not None and mask.dtype is not torch.bool:
        logits = logits + mask.to(wide).masked_fill(mask == -math.inf, 0.0)
    if visible is not None:
        logits = logits.masked_fill(~visible, torch.finfo(wide).min)
    if sinks is not None:
        sink = sinks.to(wide).reshape(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
        found = torch.softmax(torch.cat([logits, sink], -1), -1)[..., :-1]
    else:
        found = torch.softmax(logits, -1)
    if visible is not None:
        found = found * visible
    return found.to(q.dtype)


def _factor(scale: Any, q: Tensor, dtype: torch.dtype) -> float | Tensor:
    if isinstance(scale, tuple):
        return torch.tensor(scale, dtype=dtype, device=q.device).view(-1, 1, 1)
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def _visible(mask: Tensor | None, T: int, S: int, causal: bool, device: torch.device) -> Tensor | None:
    """Which keys a query sees, where something hides any."""
    visible = torch.ones(T, S, dtype=torch.bool, device=device).tril() if causal else None
    if mask is None:
        return visible
    shown = mask if mask.dtype is torch.bool else mask > -math.inf
    return shown if visible is None else shown & visible
