"""`torch.nn.functional.scaled_dot_product_attention` on levelhead: same signature, same meaning.

Queries and keys are aligned at their first positions, a boolean mask says who may attend, batch and
heads broadcast, and dropout's seed comes from PyTorch's generator, so that checkpointing and
compile replay it. Beyond PyTorch: a mask and `is_causal` together mean both. `patch` puts it in the
original's place.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from levelhead import _core
from levelhead.torch.ops import LevelheadRuntimeError, Options, attend, observed
from levelhead.torch.swap import Swap

__all__ = ["patch", "scaled_dot_product_attention"]

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_SEEDS = 2**62


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(query keyᵀ · scale + mask) value, as `torch.nn.functional` defines it.

    Args:
        query: (..., Hq, L, E); key (..., H, S, E); value (..., H, S, Ev).
        attn_mask: bool (True: takes part) or additive, broadcastable to (..., Hq, L, S).
        dropout_p: share of weights dropped, always (there is no training flag here).
        is_causal: key j is hidden from query i when j > i; together with a mask both count.
        scale: 1/√E when None.
        enable_gqa: query heads share key/value heads, Hq / H each.

    Returns:
        (..., Hq, L, Ev), differentiable. A query that sees no key gets 0.
    """
    if not torch.compiler.is_compiling() and attn_mask is None and dropout_p == 0.0:
        done = _through_the_door(query, key, value, is_causal, scale)
        if done is not None:
            return done
    return extended(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def extended(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `scaled_dot_product_attention`, with the two options that models have added since."""
    _check(query, key, value, attn_mask, dropout_p)
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (x.to(dtype) for x in (query, key, value))
        if attn_mask is not None and attn_mask.dtype is not torch.bool:
            attn_mask = attn_mask.to(dtype)
    rank = query.dim()
    q, k, v = broadcast(query, key, value, enable_gqa)
    _check_mask_shape(attn_mask, (*q.shape[:-1], k.shape[-2]))
    H, D = q.shape[-3], q.shape[-1]
    factor = (1 / math.sqrt(D) if D else 1.0) if scale is None else float(scale)
    drops = 0.0 < dropout_p < 1.0
    options = Options(
        scale=torch.full((H,), factor, dtype=torch.float64),
        mask=attn_mask,
        sinks=sinks,
        causal=is_causal,
        softcap=softcap,
        dropout=dropout_p if drops else 0.0,
        seed=torch.randint(_SEEDS, (), dtype=torch.int64) if drops else None,
    )
    out, _ = attend(q, k, v, options)
    if dropout_p == 1.0:  # nothing is kept
        out = out * 0.0
    while out.dim() > rank:
        out = out.squeeze(0)
    return out


def _through_the_door(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None
) -> Tensor | None:
    """Plain eager tensors go straight to the core, as long as both conventions say the same."""
    plain = all(type(x) is Tensor and x.layout is torch.strided for x in (q, k, v))
    if not plain or q.is_nested or q.dim() < 3 or torch.is_autocast_enabled("cpu"):
        return None
    if q.shape[:-2] != k.shape[:-2]:  # to be broadcast, or grouped
        return None
    if is_causal and q.shape[-2] != k.shape[-2]:  # the door aligns the last positions
        return None
    if torch._C._len_torch_dispatch_stack() or torch._C._is_torch_function_mode_enabled():
        return None
    if observed():  # the door gives no statistics
        return None
    found: Tensor | None = _core.attend(q, k, v, scale, bool(is_causal), None)
    return found


# ---- what may come in


def _wrong(name: str, expected: str, given: object, advice: str) -> LevelheadRuntimeError:
    return LevelheadRuntimeError(f"{name}: expected {expected}, got {given}. {advice}.")


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> None:
    for name, x in (("query", q), ("key", k), ("value", v), ("attn_mask", mask)):
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
        if x.is_nested or x.layout is not torch.strided:
            kind = "a nested tensor" if x.is_nested else str(x.layout)
            raise _wrong(name, "a dense tensor", kind, "Convert it, or use torch's own attention")
        if x.device.type not in ("cpu", "meta"):
            raise _wrong(name, "a tensor on device cpu", x.device, "Move it, or do not patch there")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in _FLOATS:
        given = ", ".join(str(x.dtype) for x in (q, k, v))
        raise _wrong("query, key, value", "the same floating dtype", given, "Convert them")
    if min(q.dim(), k.dim(), v.dim()) < 2:
        given = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise _wrong("query, key, value", "at least 2 dimensions", given, "Add the missing ones")
    if mask is not None and mask.dtype not in (torch.bool, q.dtype, torch.float32):
        advice = "Use bool, or cast an additive mask to the query's dtype"
        raise _wrong("attn_mask", f"bool, float32 or {q.dtype}", mask.dtype, advice)
    if not 0.0 <= dropout <= 1.0:
        raise _wrong("dropout_p", "a probability", dropout, "It lies between 0 and 1")


def broadcast(q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The three with the same leading dimensions, rank 4 or more; heads too, unless they group."""
    while min(q.dim(), k.dim(), v.dim()) < 4:
        q, k, v = (x.unsqueeze(0) if x.dim() < 4 else x for x in (q, k, v))
    shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
    advice = "The sizes are (..., heads, tokens, width)"
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        wanted = "key as wide as query, and as many values as keys"
        raise _wrong("query, key, value", wanted, shapes, advice)
    heads = -3 if gqa else -2
    try:
        lead = torch.broadcast_shapes(*(x.shape[:heads] for x in (q, k, v)))  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        wanted = "leading dimensions that broadcast" + ("" if gqa else " (or enable_gqa=True)")
        raise _wrong("query, key, value", wanted, shapes, advice) from error
    q, k, v = (x.expand((*lead, *x.shape[heads:])) for x in (q, k, v))
    H, G, G_v = q.shape[-3], k.shape[-3], v.shape[-3]
    if G_v != G or (H % G if G else H):
        wanted = "as many value heads as key heads, and query heads a multiple of them"
        raise _wrong("query, key, value", wanted, shapes, advice)
    return q, k, v


def _check_mask_shape(mask: Tensor | None, shape: tuple[int, ...]) -> None:
    if mask is None:
        return
    sizes = tuple(mask.shape)
    fits = len(sizes) <= len(shape) and all(
        n in (1, m) for n, m in zip(sizes[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise _wrong("attn_mask", f"a shape that broadcasts to {shape}", sizes, "Reshape it")


# ---- in the original's place

ORIGINAL = functional.scaled_dot_product_attention


class patch:  # noqa: N801  a verb, used as a call and in `with`
    """Puts levelhead in the place of `F.scaled_dot_product_attention`, wherever that was imported.

    `patch()` alone holds until `.undo()`; as a context manager, until its end. Then every place has
    the original again; a module that is first imported in between keeps what it found.
    """

    active: ClassVar[list[patch]] = []

    def __init__(self) -> None:
        self._swap = Swap({ORIGINAL: scaled_dot_product_attention}, KEPT)
        self.active.append(self)

    def undo(self) -> None:
        """Puts the original back where it was."""
        self._swap.undo()
        if self in self.active:
            self.active.remove(self)

    def __enter__(self) -> patch:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()


# Where the original itself lives, and where it is kept to be put back.
KEPT = ("torch._C._nn", __name__)
