"""Attention in PyTorch's own differentiable operations: the formula that `levelhead::attend` fuses.

It serves what the core does not compute: second derivatives (gradient penalties, Hessians) and forward mode. It stores
the matrix of logits, T · S numbers per head, so nothing else calls it. The formula of the logits is `reference.score`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from levelhead import reference
from levelhead.call.dropout import dropout_keep
from levelhead.call.options import Scoring

_vjp: Any = torch.func.vjp


def second(
    qkv: dict[str, Tensor], scoring: Scoring, incoming: dict[str, Tensor], by: dict[str, Tensor], real: torch.dtype
) -> dict[str, Tensor]:
    """The gradient of the gradients named in `by`, with the incoming gradient of each.

    `incoming` are dout and, unless it is zero, dlogsumexp of the first backward pass. Returns one gradient by name for
    every float input, and for `incoming`.
    """
    inputs = qkv | {name: getattr(scoring, name) for name in ("scale", "mask", "sinks")}
    moved = {name: x for name, x in inputs.items() if _is_float(x)} | incoming
    keep = kept(scoring, qkv["q"], qkv["k"])

    def gradients(moved: dict[str, Tensor]) -> dict[str, Tensor]:
        def forward(these: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            now = inputs | moved | these
            changed = scoring._replace(**{name: now[name] for name in ("scale", "mask", "sinks")})
            return attend(now["q"], now["k"], now["v"], changed, keep, real)

        (_, logsumexp), pull = _vjp(forward, {name: moved[name] for name in by})
        per_row = moved.get("dlogsumexp", torch.zeros_like(logsumexp))
        first: dict[str, Tensor] = pull((moved["dout"].to(real), per_row.to(real)))[0]
        return first

    first, pull = _vjp(gradients, moved)
    result: dict[str, Tensor] = pull({name: x.to(first[name].dtype) for name, x in by.items()})[0]
    return result


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def attend(
    q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, kept: Tensor | None, real: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp as the operator gives them, computed in `real`."""
    rows, width = q.shape[:-1], v.shape[-1]
    q, k, v = (x.to(real) if x.dim() > 2 else x.to(real)[None] for x in (q, k, v))
    groups = q.shape[-3] // max(k.shape[-3], 1)
    k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)
    if scoring.cosine:
        q, k = _unit(q), _unit(k)
    index = torch.arange(q.shape[-2])
    exists = scoring.exists(index)
    if exists is not None:
        exists = exists.reshape(*q.shape[:-3], 1, -1, 1)
        q = q.masked_fill(~exists, 0.0)
    floats = {name: x.to(real) for name, x in scoring._asdict().items() if _is_float(x)}
    logits = reference.score(scoring._replace(**floats), q @ k.mT, index, torch.arange(k.shape[-2]))
    w, logsumexp = _softmax(logits, scoring.sinks, exists)
    if kept is not None:
        w = w * kept.to(real).reshape(w.shape)
    return (w @ v).reshape(*rows, width), logsumexp.reshape(rows)


def kept(scoring: Scoring, q: Tensor, k: Tensor) -> Tensor | None:
    """The factor dropout puts on every weight, (B, H, T, S). NumPy's, so out of torch.func."""
    if not scoring.dropout:
        return None
    p = scoring.positions(torch.arange(q.shape[-2])).expand(math.prod(q.shape[:-3]), -1).numpy()
    seed = int(scoring.seed) % 2**64
    keep = dropout_keep(seed, scoring.dropout, len(scoring.scale), p, np.arange(k.shape[-2]))
    return torch.from_numpy(keep / (1.0 - scoring.dropout))


def _unit(x: Tensor) -> Tensor:
    """Rows of norm 1; a zero row stays zero, with zero gradient."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / norm.masked_fill(norm == 0, math.inf)


def _softmax(s: Tensor, sinks: Tensor | None, exists: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights and logsumexp; a row that sees nothing has weights 0 and -inf."""
    if sinks is not None:
        sink = sinks.to(s.dtype)[:, None, None].expand((*s.shape[:-1], 1))
        s = torch.cat([s, sink if exists is None else sink.masked_fill(~exists, -math.inf)], -1)
    none = (s == -math.inf).all(-1, keepdim=True)
    m = s.detach().amax(-1, keepdim=True) if s.shape[-1] else s.new_zeros((*s.shape[:-1], 1))
    m = m.masked_fill(none, 0.0)
    e = torch.exp(s - m)
    total = e.sum(-1, keepdim=True).masked_fill(none, 1.0)
    logsumexp = (total.log() + m).masked_fill(none, -math.inf)
    w = e / total
    return (w if sinks is None else w[..., :-1]), logsumexp.squeeze(-1)
