"""Attention in PyTorch's own differentiable operations: the formula that `levelhead::attend` fuses.

It serves what the core does not compute: second derivatives (gradient penalties, Hessians) and forward mode. It stores
the matrix of logits, T · S numbers per head, so nothing else calls it. The weights are those of `torch.weights`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from levelhead.call.dropout import dropout_keep
from levelhead.call.options import Scoring
from levelhead.torch.weights import is_float, weights_and_logsumexp

_vjp: Any = torch.func.vjp


def second(
    qkv: dict[str, Tensor], scoring: Scoring, incoming: dict[str, Tensor], by: dict[str, Tensor], real: torch.dtype
) -> dict[str, Tensor]:
    """The gradient of the gradients named in `by`, with the incoming gradient of each.

    `incoming` are dout and, unless it is zero, dlogsumexp of the first backward pass. Returns one gradient by name for
    every float input, and for `incoming`.
    """
    inputs = qkv | {name: getattr(scoring, name) for name in ("scale", "mask", "sinks")}
    moved = {name: x for name, x in inputs.items() if is_float(x)} | incoming
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


def attend(
    q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, kept: Tensor | None, real: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp as the operator gives them, computed in `real`."""
    w, logsumexp = weights_and_logsumexp(q, k, scoring, real)
    values = v.to(real) if v.dim() > 2 else v.to(real)[None]
    values = values.repeat_interleave(w.shape[-3] // max(values.shape[-3], 1), -3)
    if kept is not None:
        w = w * kept.to(real).reshape(w.shape)
    return (w @ values).reshape(*q.shape[:-1], v.shape[-1]), logsumexp.reshape(q.shape[:-1])


def kept(scoring: Scoring, q: Tensor, k: Tensor) -> Tensor | None:
    """The factor dropout puts on every weight, (B, H, T, S). NumPy's, so out of torch.func."""
    if not scoring.dropout:
        return None
    p = scoring.positions(torch.arange(q.shape[-2])).expand(math.prod(q.shape[:-3]), -1).numpy()
    seed = int(scoring.seed) % 2**64
    keep = dropout_keep(seed, scoring.dropout, len(scoring.scale), p, np.arange(k.shape[-2]))
    return torch.from_numpy(keep / (1.0 - scoring.dropout))
