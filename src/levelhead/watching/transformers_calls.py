"""Hugging Face's attention interface: what its arguments ask of the softmax, by implementation.

Version 5 asks one function, `get_interface`, for every attention function, eager ones included;
version 4 looks registered ones up in a mapping and calls eager ones by name. Here both are wrapped.
An eager function that does more than softmax(q kᵀ · scale + mask) v is not described but watched:
the softmax inside it tells its logits, and so does that of a module from before the interface.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.torch.huggingface.survey import attending_modules, eager_functions, understood
from levelhead.torch.swap import Function, Layer, wraps
from levelhead.watching.measure import Call, call_of


class Interface:
    """Has every function that transformers' interface hands out wrapped, while installed:
    `called(function, name, module, ...)` is what runs instead of function(module, ...)."""

    def __init__(self, called: Function) -> None:
        self._called = called
        self._layers: list[Layer] = []

    def install(self) -> None:
        if "transformers" not in sys.modules:
            return
        utils = importlib.import_module("transformers.modeling_utils")
        kind = type(utils.ALL_ATTENTION_FUNCTIONS)
        self._layers = [Layer(kind, "__getitem__", self._getitem)]
        if hasattr(kind, "get_interface"):
            self._layers.append(Layer(kind, "get_interface", self._get_interface))
            return
        for name, module in list(sys.modules.items()):  # version 4
            eager = getattr(module, "__dict__", {}).get("eager_attention_forward")
            if name.startswith("transformers.models.") and callable(eager):
                wrap = functools.partial(self._over, name="eager")
                self._layers.append(Layer(module, "eager_attention_forward", wrap))

    def remove(self) -> None:
        for layer in self._layers:
            layer.undo()
        self._layers = []

    def _getitem(self, below: Function) -> Function:
        def __getitem__(table: Any, key: str) -> Function:  # noqa: N807  a method in the making
            return self._over(below(table, key), key)

        return __getitem__

    def _get_interface(self, below: Function) -> Function:
        def get_interface(table: Any, attn_implementation: str, default: Function) -> Function:
            return self._over(below(table, attn_implementation, default), attn_implementation or "eager")

        return get_interface

    def _over(self, found: Function, name: str) -> Function:
        if wraps(found, self._called):
            return found
        return functools.partial(self._called, found, name)


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
    scale = D**-0.5 if scaling is None else scaling
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
