"""Attention in PyTorch's own differentiable operations: the formula that `levelhead::attend` fuses.

It serves what the core does not compute: second derivatives (gradient penalties, Hessians) and forward mode. It stores
the matrix of logits, T · S numbers per head, so nothing else calls it. The weights are those of `torch.weights`.

A product with 0 does not hide a NaN. Queries and keys that hold one become 0 before any product, and their logits NaN
(`Spoiled`): what sees such a row is NaN as before, and where it is hidden nothing of it is left.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from levelhead.call.dropout import dropout_keep
from levelhead.call.options import Scoring
from levelhead.torch.weights import Spoiled, finite, is_float, weights_and_logsumexp

_vjp: Any = torch.func.vjp
_OF_QUERIES = {"q", "dout", "dlogsumexp"}
_OF_KEYS = {"k", "v"}


def second(
    qkv: dict[str, Tensor], scoring: Scoring, incoming: dict[str, Tensor], by: dict[str, Tensor], real: torch.dtype
) -> dict[str, Tensor]:
    """The gradient of the gradients named in `by`, with the incoming gradient of each.

    `incoming` are dout and, unless it is zero, dlogsumexp of the first backward pass. Returns one gradient by name for
    every float input, and for `incoming`.
    """
    spoiled = _spoiled(qkv | incoming, by)
    qkv, incoming, by = (_cleaned(x) for x in (qkv, incoming, by))
    inputs = qkv | {name: getattr(scoring, name) for name in ("scale", "mask", "sinks")}
    moved = {name: x for name, x in inputs.items() if is_float(x)} | incoming
    keep = kept(scoring, qkv["q"], qkv["k"])

    def gradients(moved: dict[str, Tensor]) -> dict[str, Tensor]:
        def forward(these: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            now = inputs | moved | these
            changed = scoring._replace(**{name: now[name] for name in ("scale", "mask", "sinks")})
            return _attend(now["q"], now["k"], now["v"], changed, keep, real, spoiled)

        (_, logsumexp), pull = _vjp(forward, {name: moved[name] for name in by})
        per_row = moved.get("dlogsumexp", torch.zeros_like(logsumexp))
        first: dict[str, Tensor] = pull((moved["dout"].to(real), per_row.to(real)))[0]
        return first

    first, pull = _vjp(gradients, moved)
    result: dict[str, Tensor] = pull({name: x.to(first[name].dtype) for name, x in by.items()})[0]
    return result


def forward_mode(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, real: torch.dtype) -> tuple[Tensor, Tensor]:
    """Output and logsumexp, for tensors with tangents."""
    qkv = {"q": q, "k": k, "v": v}
    keep, clean = kept(scoring, q, k), _cleaned(qkv)
    return _attend(clean["q"], clean["k"], clean["v"], scoring, keep, real, _spoiled(qkv))


def _cleaned(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With 0 for what is not finite, in tensors of queries and keys."""
    return {name: finite(x) if name in _OF_QUERIES | _OF_KEYS else x for name, x in tensors.items()}


def _spoiled(*parts: dict[str, Tensor]) -> Spoiled:
    """Which queries and keys hold a NaN or inf, themselves or in their gradients."""

    def union(names: Collection[str]) -> Tensor:
        known = [(name, x.isfinite()) for part in parts for name, x in part.items() if name in names]
        return ~torch.stack([x if name == "dlogsumexp" else x.all(-1) for name, x in known]).all(0)

    return Spoiled(union(_OF_QUERIES), union(_OF_KEYS))


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, kept: Tensor | None, real: torch.dtype, spoiled: Spoiled
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp as the operator gives them, computed in `real`."""
    w, logsumexp = weights_and_logsumexp(q, k, scoring, real, spoiled=spoiled)
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
