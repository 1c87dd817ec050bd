"""The weights of attention as a tensor, for those who ask for them: `output_attentions`, `observe(weights=)`.

The formula in PyTorch's own operations, so weights are differentiable like those of an eager implementation, any number
of times. They take B · H · rows · S numbers of q's dtype, and about three times as many of the type that is computed in
meanwhile; attention itself never forms them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from levelhead import reference
from levelhead.call.options import Scoring


def weights(q: Tensor, k: Tensor, scoring: Scoring, rows: Tensor | None = None) -> Tensor:
    """softmax of the logits, (..., H, T, S) in q's dtype: exact, 0 where a key is hidden and in a row that sees none.

    Differentiable by q, k and the scale, the mask and the sinks in `scoring`. A sink takes its part of the weight, so a
    row sums to less than 1. Dropout is left out.

    Args:
        q: (..., H, T, D), or (T, D).
        k: (..., G, S, D); H is a multiple of G.
        scoring: the options of the call, with tensors.
        rows: (R,) indices of the queries that are wanted; None: all.

    >>> q, k = torch.zeros(2, 3, 4), torch.zeros(2, 5, 4)
    >>> weights(q, k, Scoring(scale=torch.ones(2)))[0, 0].tolist()
    [0.20000000298023224, 0.20000000298023224, 0.20000000298023224, 0.20000000298023224, 0.20000000298023224]
    """
    real = torch.float64 if q.dtype is torch.float64 else torch.float32
    w, _ = weights_and_logsumexp(q, k, scoring, real, rows)
    return w.to(q.dtype).reshape(*q.shape[:-2], *w.shape[-2:])


class Spoiled(NamedTuple):
    """Which queries (..., H, T) and which keys (..., G, S) are not finite. Their logits are NaN."""

    queries: Tensor
    keys: Tensor


def finite(x: Tensor) -> Tensor:
    """With 0 for what is not finite: 0 times NaN is NaN, also where the NaN is hidden."""
    return x.where(x.isfinite(), 0.0)


def weights_and_logsumexp(
    q: Tensor,
    k: Tensor,
    scoring: Scoring,
    real: torch.dtype,
    rows: Tensor | None = None,
    spoiled: Spoiled | None = None,
) -> tuple[Tensor, Tensor]:
    """Both computed in `real`, (..., H, T, S) and (..., H, T); q and k of two dimensions are one head.

    `spoiled`: for a q and k that are finite already.
    """
    index = torch.arange(q.shape[-2], device=q.device) if rows is None else rows
    if rows is not None:
        q, scoring = q.index_select(-2, rows), scoring.of_rows(rows)
    if spoiled is None:
        spoiled = Spoiled(*(~x.isfinite().all(-1) for x in (q, k)))
        q, k = finite(q), finite(k)
    q, k = (x.to(real) if x.dim() > 2 else x.to(real)[None] for x in (q, k))
    groups = q.shape[-3] // max(k.shape[-3], 1)
    k = k.repeat_interleave(groups, -3)
    wild_queries, wild_keys = (torch.where(x if x.dim() > 1 else x[None], math.nan, 0.0).to(real) for x in spoiled)
    if scoring.cosine:
        q, k = _unit(q), _unit(k)
    exists = scoring.exists(index)
    if exists is not None:
        exists = exists.reshape(*q.shape[:-3], 1, -1, 1)
    floats = {name: x.to(real) for name, x in scoring._asdict().items() if is_float(x)}
    keys = torch.arange(k.shape[-2], device=q.device)
    # Added, not selected: the gradient of what sees a NaN is NaN too.
    products = q @ k.mT + (wild_queries[..., :, None] + wild_keys.repeat_interleave(groups, -2)[..., None, :])
    logits = reference.score(scoring._replace(**floats), products, index, keys)
    return _softmax(logits, scoring.sinks, exists)


def is_float(x: Any) -> bool:
    """Whether it is a tensor that may be differentiated."""
    return isinstance(x, Tensor) and x.is_floating_point()


def _unit(x: Tensor) -> Tensor:
    """Rows of norm 1; a zero row stays zero, with zero gradient."""
    zero = (x == 0).all(-1, keepdim=True)
    norm: Tensor = torch.linalg.vector_norm(x.masked_fill(zero, 1.0), dim=-1, keepdim=True)  # smooth where it is taken
    return (x / norm.masked_fill(norm == 0, math.inf)).masked_fill(zero, 0.0)


def _softmax(s: Tensor, sinks: Tensor | None, exists: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights and logsumexp; a row that sees nothing has weights 0 and -inf."""
    if sinks is not None:
        sink = sinks.to(s.dtype)[:, None, None].expand((*s.shape[:-1], 1))
        s = torch.cat([s, sink if exists is None else sink.masked_fill(~exists, -math.inf)], -1)
    none = (s == -math.inf).all(-1, keepdim=True)
    with torch.no_grad():  # not detach(), which torch.autograd.functional.hessian(vectorize=True) cannot batch
        m = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_zeros((*s.shape[:-1], 1))
    m = m.masked_fill(none, 0.0)
    e = torch.exp(s - m)
    total = e.sum(-1, keepdim=True).masked_fill(none, 1.0)
    logsumexp = (total.log() + m).masked_fill(none, -math.inf)
    w = e / total
    return (w if sinks is None else w[..., :-1]), logsumexp.squeeze(-1)
