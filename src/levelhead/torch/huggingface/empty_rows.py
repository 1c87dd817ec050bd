"""Queries from which an additive mask hides every key by a finite number.

Such a number swallows the logits by rounding, so that a model's own attention has equal weights there. Its logsumexp
cannot hold both the number and the count of keys, which gradients need; so these rows get logits of 0 instead. Who
observes the call must know it as it was: `as_given`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from levelhead.torch.operators import describe_as

_SWALLOWS = -1e8  # the step between float32 numbers is 8 here


def leveled(q: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Queries and bias with logits of 0 in rows where every key is hidden by a finite number."""
    if bias is None or bias.dtype is torch.bool:
        return q, bias
    top = bias.amax(-1, keepdim=True)
    empty = (top <= max(torch.finfo(bias.dtype).min / 2, _SWALLOWS)) & (top > -math.inf)
    if not torch.compiler.is_compiling() and not bool(empty.any()):
        return q, bias
    return torch.where(empty, 0.0, q).to(q.dtype), bias.masked_fill(empty, 0.0)


def as_given(computed: Tensor, q: Tensor, bias: Tensor | None) -> None:
    """Has the pass that ran observed as one of these queries and this bias, if others were `computed` with."""
    if computed is not q and not torch.compiler.is_compiling():
        describe_as(q, bias)
