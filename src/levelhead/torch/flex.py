"""levelhead's options as functions for `torch.nn.attention.flex_attention`, and its call.

Auxiliary results are asked for only where the output needs them: the logsumexp, for sinks. The pass that gives the
statistics has logsumexp and maximum among them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from levelhead import reference
from levelhead.call.options import NUMBER, Scoring, fields
from levelhead.torch.operators import wide
from levelhead.torch.tensor_options import Described

HIDING = {"causal", "left", "right", "key_lengths", "query_lengths", "query_segments", "key_segments"}
_NUMBERS = fields(NUMBER)


def by_flex(q: Tensor, k: Tensor, v: Tensor, call: Described, scoring: Scoring) -> Tensor:
    """The output (B, H, T, E); `scoring`: the options, with positions shared by batch rows where they are."""
    from torch.nn.attention.flex_attention import AuxRequest

    scores, sinks = _scores(q, call, scoring), scoring.sinks
    found: Any = _flex(q.device.type)(
        q,
        k,
        v,
        scores,
        _blocks(q, k, scoring),
        1.0 if call.factor is None else call.factor,
        enable_gqa=grouped(q, k),
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )
    return found if sinks is None else _with_sinks(found[0], found[1].lse, sinks)


def grouped(q: Tensor, k: Tensor) -> bool:
    """Whether heads share keys. Numbers of heads are numbers, also in a graph of dynamic sizes."""
    return operator.index(q.shape[1]) != operator.index(k.shape[1])


@cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Any] = torch.compile(flex_attention)
    return compiled


def _flex(device: str) -> Any:
    """Fused where it is compiled; a graph that is traced compiles it itself."""
    from torch.nn.attention.flex_attention import flex_attention

    return _compiled() if device == "cuda" and not torch.compiler.is_compiling() else flex_attention


def _scores(q: Tensor, call: Described, scoring: Scoring) -> Callable[..., Any] | None:
    """What happens to a score after the scale that all heads share; None: nothing."""
    real = wide(q.dtype)
    scale = None if call.factor is not None else scoring.scale.to(real)
    slopes = None if scoring.alibi is None else scoring.alibi.to(real)
    starts = _picked(scoring.query_start)
    bias = _picked(scoring.mask) if _adds(scoring.mask) else None
    # Numbers as tensors: a second value of a Python float becomes a symbol, which flex cannot trace with gradients.
    numbers = {name: x for name, x in scoring._asdict().items() if name in _NUMBERS and x is not None}
    tensors: Any = {name: torch.full((), x, dtype=real, device=q.device) for name, x in numbers.items()}
    held = scoring._replace(**tensors)

    def changed(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        if scale is not None:
            s = s * scale[h]
        s = reference.capped(held, s)
        if slopes is not None:
            s = s - slopes[h] * (starts(b) + i - j).abs()
        return s if bias is None else s + bias(b, h, i, j)

    return changed


def _blocks(q: Tensor, k: Tensor, scoring: Scoring) -> Any:
    """Which keys are seen, by blocks; None: all."""
    from torch.nn.attention.flex_attention import create_block_mask

    mask = None if _adds(scoring.mask) else scoring.mask
    if mask is None and not HIDING & scoring.keywords().keys():
        return None
    T, S = q.shape[2], k.shape[2]
    first, last = scoring.reach(torch.arange(T, device=q.device))
    begin, end = _picked(first), _picked(last)
    shown = _picked(mask)
    mine, theirs = _picked(scoring.query_segments), _picked(scoring.key_segments)

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        visible = (j >= begin(b, i)) & (j <= end(b, i))
        if mine is not None:
            visible = visible & (mine(b, i) == theirs(b, j))
        return visible if shown is None else visible & shown(b, h, i, j)

    heads = q.shape[1] if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1 else None
    several = [x for x in (first, scoring.query_segments) if x is not None and len(x) > 1]
    batch = q.shape[0] if several or (mask is not None and mask.dim() > 3 and mask.shape[0] > 1) else None
    return create_block_mask(seen, batch, heads, T, S, device=q.device)


def _adds(mask: Tensor | None) -> bool:
    return mask is not None and mask.dtype is not torch.bool


def _picked(x: Tensor | None) -> Any:
    """A function of indices, of which the last ones count and those of dimensions of size 1 do not; None: no tensor."""
    if x is None:
        return None
    kept = [d for d in range(-x.dim(), 0) if x.shape[d] != 1]
    rest = x.squeeze()

    def picked(*index: Any) -> Any:
        return rest[tuple(index[d] for d in kept)] if kept else rest

    return picked


def _with_sinks(out: Tensor, logsumexp: Tensor, sinks: Tensor) -> Tensor:
    """The output with a sink in each head's denominator; a row that sees nothing is 0 already."""
    away = logsumexp - sinks.to(logsumexp.dtype)[:, None]
    share = torch.sigmoid(away.masked_fill(logsumexp == -torch.inf, 0.0))
    return (out.to(logsumexp.dtype) * share[..., None]).to(out.dtype)
