"""What the arguments of transformers' attention functions mean, by implementation.

An eager function that does more than softmax(q kᵀ · scale + mask) v is not described by its arguments: the softmax
inside it is observed instead, and so is that of a module from before the attention interface.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.call.scaling import usual
from levelhead.torch.huggingface.survey import attending_modules, eager_functions, understood
from levelhead.watching.measure import Call, call_of

is_understood = functools.cache(understood)


def eager_is_understood(module: nn.Module) -> bool:
    """Whether each eager function that a module may call is softmax(q kᵀ · scale + mask) v; read before Dynamo traces,
    which cannot read code."""
    kind = type(module)
    if kind not in _understood:
        _understood[kind] = all(understood(f) for f in eager_functions(module))
    return _understood[kind]


_understood: dict[type, bool] = {}


def forms_softmax_by_hand(module: nn.Module) -> bool:
    """Whether it is a transformers module from before the interface; some still are."""
    if not type(module).__module__.startswith("transformers.models."):
        return False
    own = next((attending for attending in attending_modules(module) if attending.module is module), None)
    return own is not None and own.by_hand and not own.interface


def describe(
    name: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *args: Any,
    scaling: Any = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    **rest: Any,
) -> Call:
    """The call that these arguments of an implementation mean."""
    T, S, D = query.shape[2], key.shape[2], query.shape[3]
    scale = usual(D) if scaling is None else scaling
    if isinstance(scale, Tensor) and scale.numel() == 1:
        query, scale = query * scale, 1.0
    sinks = s_aux if s_aux is not None else getattr(module, "sinks", None)
    if name == "eager":
        mask = attention_mask if attention_mask is None else attention_mask[..., :S]
        return call_of(query, key, scale, mask=_joined(mask, position_bias), softcap=softcap, sinks=sinks)
    if name == "flex_attention":
        mask = _flex_mask(attention_mask, query.shape[:3], S)
        return call_of(query, key, scale, mask=_joined(mask, position_bias), softcap=softcap, sinks=sinks)
    causal = bool(T > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal))
    mask = attention_mask
    if mask is not None and mask.dim() == 2:  # which keys are no padding
        mask = mask.bool()[:, None, None, :S]
    left = None if sliding_window is None else sliding_window - 1
    options = {"mask": mask, "causal": causal, "left": left, "softcap": softcap, "sinks": sinks}
    return call_of(query, key, scale, S - T, **options)


def _joined(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    if mask is None or bias is None:
        return bias if mask is None else mask
    if mask.dtype is torch.bool:
        return torch.where(mask, bias, -torch.inf)
    return mask + bias


def _flex_mask(mask: Any, rows: Any, S: int) -> Tensor | None:
    from torch.nn.attention.flex_attention import BlockMask, create_mask

    if isinstance(mask, BlockMask):
        B, H, T = rows
        return create_mask(mask.mask_mod, B, H, T, S, device=mask.kv_num_blocks.device)
    return None if mask is None else mask[..., :S]
