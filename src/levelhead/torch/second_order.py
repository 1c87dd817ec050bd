"""Attention in PyTorch's own differentiable operations: the formula that `levelhead::attend` fuses.

It serves second derivatives, which the core does not compute: gradient penalties, Hessians. It
stores the matrix of logits, T · S numbers per head, so nothing else calls it.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from levelhead.call.dropout import dropout_keep

__all__ = ["attend", "second"]


def second(
    given: dict[str, Any], dout: Tensor, dlogsumexp: Tensor | None, by: dict[str, Tensor], real: torch.dtype
) -> dict[str, Tensor]:
    """The gradient of the gradients named in `by`, with what comes back for each of them.

    Args:
        given: q, k, v and every option, by name.
        dout, dlogsumexp: what came back for output and logsumexp.

    Returns:
        One gradient by name for everything that is a float, and for dout and dlogsumexp.
    """
    learned = ("q", "k", "v", "scale", "mask", "sinks")
    moved = {name: given[name] for name in learned if _is_float(given[name])}
    kept = _kept(SimpleNamespace(**given))
    moved |= {"dout": dout} | ({} if dlogsumexp is None else {"dlogsumexp": dlogsumexp})

    def gradients(moved: dict[str, Tensor]) -> dict[str, Tensor]:
        def forward(these: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            now = SimpleNamespace(**(given | moved | these))
            return attend(now, kept, real)

        of: Any = torch.func.vjp(forward, {name: moved[name] for name in by})
        (_, logsumexp), pull = of
        per_row = moved.get("dlogsumexp", torch.zeros_like(logsumexp))
        found: dict[str, Tensor] = pull((moved["dout"].to(real), per_row.to(real)))[0]
        return found

    of: Any = torch.func.vjp(gradients, moved)
    first, pull = of
    found: dict[str, Tensor] = pull({name: x.to(first[name].dtype) for name, x in by.items()})[0]
    return found


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def attend(options: Any, kept: Tensor | None, real: torch.dtype) -> tuple[Tensor, Tensor]:
    """Output and logsumexp as the operator gives them, computed in `real`."""
    q, k, v = options.q, options.k, options.v
    rows, width = q.shape[:-1], v.shape[-1]
    T, S = q.shape[-2], k.shape[-2]
    q, k, v = (x.to(real) if x.dim() > 2 else x.to(real)[None] for x in (q, k, v))
    H = q.shape[-3]
    B = math.prod(q.shape[:-3])
    groups = H // max(k.shape[-3], 1)
    k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)
    p = _positions(options, B, T)
    seen = _seen(options, p, S).reshape(*q.shape[:-3], 1, T, S)
    if options.cosine:
        q, k = _unit(q), _unit(k)
    s = (q @ k.mT) * options.scale.to(real)[:, None, None]
    if options.log_n:
        s = s * seen.sum(-1, keepdim=True).clamp_min(1).to(real).log()
    if options.softcap is not None:
        s = options.softcap * torch.tanh(s / options.softcap)
    if options.alibi is not None:
        distance = (p[:, :, None] - torch.arange(S)).abs()
        s = s - options.alibi.to(real)[:, None, None] * distance.reshape(seen.shape)
    if options.mask is not None and options.mask.dtype is torch.bool:
        seen = seen & options.mask
    elif options.mask is not None:
        s, seen = s + options.mask.to(real), seen & (options.mask != -math.inf)
    w, logsumexp = _softmax(s.masked_fill(~seen, -math.inf), options.sinks)
    if kept is not None:
        w = w * kept.to(real).reshape(w.shape)
    return (w @ v).reshape(*rows, width), logsumexp.reshape(rows)


def _positions(options: Any, B: int, T: int) -> Tensor:
    p = torch.arange(T).expand(B, T)
    return p if options.query_start is None else p + options.query_start[:, None]


def _kept(options: Any) -> Tensor | None:
    """The factor dropout puts on every weight, (B, H, T, S). NumPy's, so out of torch.func."""
    if not options.dropout:
        return None
    H, T, S = len(options.scale), options.q.shape[-2], options.k.shape[-2]
    p = _positions(options, math.prod(options.q.shape[:-3]), T).numpy()
    seed = int(options.seed) % 2**64
    keep = dropout_keep(seed, options.dropout, H, p, np.arange(S))
    return torch.from_numpy(keep / (1.0 - options.dropout))


def _seen(options: Any, p: Tensor, S: int) -> Tensor:
    """Who may see whom by position and segment, (B, T, S)."""
    p, j = p[:, :, None], torch.arange(S)
    seen = torch.ones((*p.shape[:2], S), dtype=torch.bool)
    if options.causal:
        seen = seen & (j <= p)
    if options.left is not None:
        seen = seen & (j >= p - options.left)
    if options.right is not None:
        seen = seen & (j <= p + options.right)
    if options.key_lengths is not None:
        seen = seen & (j < options.key_lengths[:, None, None])
    if options.query_segments is not None:
        seen = seen & (options.query_segments[:, :, None] == options.key_segments[:, None, :])
    return seen


def _unit(x: Tensor) -> Tensor:
    """Rows of norm 1; a zero row stays zero, with zero gradient."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / norm.masked_fill(norm == 0, math.inf)


def _softmax(s: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights and logsumexp; a row that sees nothing has weights 0 and -inf."""
    if sinks is not None:
        sink = sinks.to(s.dtype)[:, None, None].expand((*s.shape[:-1], 1))
        s = torch.cat([s, sink], -1)
    none = (s == -math.inf).all(-1, keepdim=True)
    m = s.detach().amax(-1, keepdim=True) if s.shape[-1] else s.new_zeros((*s.shape[:-1], 1))
    m = m.masked_fill(none, 0.0)
    e = torch.exp(s - m)
    total = e.sum(-1, keepdim=True).masked_fill(none, 1.0)
    logsumexp = (total.log() + m).masked_fill(none, -math.inf)
    w = e / total
    return (w if sinks is None else w[..., :-1]), logsumexp.squeeze(-1)
