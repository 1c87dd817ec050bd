"""Additive attention for tensors: the projections are PyTorch's, the rest is the core's, forward and backward."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from levelhead import _core
from levelhead.additive import OCTAVES, check_weights, keywords_of
from levelhead.call import arrays
from levelhead.call.options import AdditiveOptions
from levelhead.call.prepare import team_for
from levelhead.torch.functorch import untraced
from levelhead.torch.operators import first_order, memory, wide


@untraced
def additive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    options: AdditiveOptions,
    *,
    threads: int | None,
) -> Tensor:
    """As `levelhead.additive_attention`."""
    with torch.no_grad():
        *_, origin = arrays.take(q, k, v)
        for name, x in (("w_q", w_q), ("w_k", w_k), ("w_v", w_v)):
            arrays.alike(name, x, origin)
        check_weights(*(tuple(x.shape) for x in (q, k, w_q, w_k, w_v)))
    real = wide(q.dtype)
    with torch.autocast("cpu", enabled=False):  # it would round what is computed in `real`
        pairs = ((q.to(real), w_q.to(real)), (k.to(real), w_k.to(real)))
        projected_q, projected_k = (_Projection.apply(*pair) for pair in pairs)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        views = (memory(projected_q), memory(projected_k), memory(v))
        keywords = keywords_of(*views, origin, options) | team_for(threads, origin)
    given = options.get("mask")
    mask = given if isinstance(given, Tensor) and given.requires_grad else None  # for its gradient alone
    inputs = (projected_q, projected_k, v.to(real), w_v.to(real), mask)
    out: Tensor = _Additive.apply(*inputs, keywords)  # type: ignore[no-untyped-call]
    return out.to(q.dtype)


class _Projection(torch.autograd.Function):
    """x wᵀ. A row without gradient gives none to w, whatever it holds: a hidden NaN times 0 would be NaN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.mT

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        x = x.masked_fill((dout == 0).all(-1, keepdim=True), 0.0)
        with torch.autocast("cpu", enabled=False):
            return dout @ w, dout.flatten(0, -2).mT @ x.flatten(0, -2)


class _Additive(torch.autograd.Function):
    """Attention from projected queries and keys."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, weights: Tensor, mask: Tensor | None, keywords: dict[str, Any]
    ) -> Tensor:
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        logsumexp = q.new_empty(q.shape[:-1])
        q, k = q * OCTAVES, k * OCTAVES
        into: dict[str, Any] = {"out": memory(out), "logsumexp": memory(logsumexp)}
        additive = memory(weights.contiguous())
        _core.forward(memory(q), memory(k), memory(v), additive=additive, **into, **keywords)
        ctx.save_for_backward(q, k, v, weights, out, logsumexp)
        ctx.keywords, ctx.mask = keywords, None if mask is None else (mask.shape, mask.dtype)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        q, k, v, weights, out, logsumexp = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        dweights = np.zeros(weights.shape)
        keywords = ctx.keywords | {"dq": memory(dq), "dk": memory(dk), "dv": memory(dv), "dadditive": dweights}
        dmask = None
        if ctx.mask is not None:
            dmask = q.new_zeros(ctx.mask[0])
            keywords["dmask"] = arrays.stretched(memory(dmask), keywords["mask"].shape)
        forward = (memory(dout), memory(q), memory(k), memory(v), memory(out), memory(logsumexp))
        _core.backward(*forward, additive=memory(weights.contiguous()), **keywords)
        dmask = None if dmask is None else dmask.to(ctx.mask[1])
        return dq, dk, dv, torch.from_numpy(dweights).to(weights.dtype), dmask, None
