"""xformers' `memory_efficient_attention`: tokens before heads, masks as objects.

Objects of the classes below are read; an object of any other class states its mask itself (`materialize`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from levelhead.call.scaling import usual
from levelhead.watching.functions import packed
from levelhead.watching.functions.known import Followed, Given, Known, unknown_options
from levelhead.watching.measure import Call, call_of

_OPTIONS = frozenset(["query", "key", "value", "attn_bias", "p", "scale", "op", "output_dtype"])


def _heads_first(x: Tensor) -> Tensor:
    """(B, M, K), (B, M, H, K) or (B, M, G, H, K) as (B, H, M, K)."""
    if x.dim() == 3:
        return x[:, None]
    return (x if x.dim() == 4 else x.flatten(2, 3)).transpose(1, 2)


def _describe(given: Given) -> Call:
    q, k = _heads_first(given["query"]), _heads_first(given["key"])
    scale, bias = given.get("scale"), given.get("attn_bias")
    factor = usual(q.shape[-1]) if scale is None else float(scale)
    if bias is None:
        return call_of(q, k, factor)
    if isinstance(bias, Tensor):
        return call_of(q, k, factor, mask=_by_head(bias, given["query"].dim()))
    fields = _positions(bias)
    if fields is None:
        T, S = q.shape[2], k.shape[2]
        return call_of(q, k, factor, mask=bias.materialize((T, S), dtype=torch.float32, device=q.device))
    bottom_right = fields.pop("bottom_right")
    if hasattr(bias, "q_seqinfo"):
        cu_q, cu_k = (_starts(info).to(q.device) for info in (bias.q_seqinfo, bias.k_seqinfo))
        tokens_q, tokens_k = (x[0].transpose(0, 1) for x in (q, k))
        return packed.call(tokens_q, tokens_k, cu_q, cu_k, factor, bottom_right=bottom_right, **fields)
    mask = getattr(bias, "_subtensor", getattr(bias, "_bias", None))
    start = k.shape[2] - q.shape[2] if bottom_right else 0
    return call_of(q, k, factor, start, mask=None if mask is None else _by_head(mask, 4), **fields)


def _by_head(bias: Tensor, dims: int) -> Tensor:
    """A bias of q with so many dimensions, broadcastable to (B, H, M, N)."""
    if dims == 3 and bias.dim() == 3:
        return bias[:, None]
    return bias.flatten(1, 2) if bias.dim() == 5 else bias


def _starts(info: Any) -> Tensor:
    starts = getattr(info, "seqstart", None)
    found: Tensor = info.cu_seqlen if starts is None else starts  # its name before 0.0.17
    return found


# What each class hides by position: causal, and whether positions are aligned at the last query and key.
_CLASSES = {
    "LowerTriangularMask": (True, False),
    "LowerTriangularMaskWithTensorBias": (True, False),
    "LowerTriangularFromBottomRightMask": (True, True),
    "LowerTriangularFromBottomRightLocalAttentionMask": (True, True),
    "LocalAttentionFromBottomRightMask": (False, True),
    "BlockDiagonalMask": (False, False),
    "BlockDiagonalCausalMask": (True, False),
    "BlockDiagonalCausalFromBottomRightMask": (True, True),
    "BlockDiagonalCausalLocalAttentionMask": (True, False),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": (True, True),
}


def _positions(bias: Any) -> dict[str, Any] | None:
    """What an object hides by position; None: it must say so itself."""
    kind = type(bias)
    if kind.__name__ not in _CLASSES or not kind.__module__.startswith("xformers"):
        return None
    causal, bottom_right = _CLASSES[kind.__name__]
    size = getattr(bias, "_window_size", None)
    left, right = (None if size is None else size - 1), None
    if hasattr(bias, "window_left"):
        left, right = bias.window_left, bias.window_right
    return {"causal": causal, "bottom_right": bottom_right, "left": left, "right": right}


def _refuses(given: Given) -> str | None:
    bias = given.get("attn_bias")
    if bias is not None and not isinstance(bias, Tensor):
        if _positions(bias) is None and not _states_itself(bias, given["query"], given["key"]):
            return f"attn_bias of type {type(bias).__name__}"
        if torch.compiler.is_compiling():
            return "attn_bias in a compiled graph"
    return unknown_options(given, _OPTIONS)


def _states_itself(bias: Any, q: Tensor, k: Tensor) -> bool:
    try:
        stated = bias.materialize((q.shape[1], k.shape[1]), dtype=torch.float32, device=q.device)
    except Exception:  # whatever a class of others raises: it cannot say
        return False
    return isinstance(stated, Tensor)


def _followed(given: Given) -> Followed:
    names = (("dq", "query"), ("dk", "key"), ("dv", "value"))
    return tuple((name, given[source], _heads_first) for name, source in names)


_NAMES = (
    "memory_efficient_attention",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
)
_MODULES = ("xformers.ops", "xformers.ops.fmha")

KNOWN = (
    Known(
        tuple(f"{module}:{name}" for name in _NAMES for module in _MODULES),
        "(B, M, H, K), (B, M, K) or (B, M, G, H, K); masks as tensors or objects, each with its own alignment",
        _describe,
        _followed,
        _refuses,
    ),
)
