"""Hugging Face's attention interface: what its arguments ask of the softmax, by implementation.

Version 5 asks one function, `get_interface`, for every attention function, eager ones included;
version 4 looks registered ones up in a mapping and calls eager ones by name. Here both are wrapped.
An eager function that does more than softmax(q kᵀ · scale + mask) v is not described but watched:
the softmax inside it tells its logits.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from levelhead.health.measure import Call
from levelhead.torch.survey import understood
from levelhead.torch.swap import Function

Wrap: TypeAlias = Callable[[Function, str], Function]


class Interface:
    """Has every function that transformers' interface hands out wrapped, while installed."""

    def __init__(self, wrap: Wrap) -> None:
        self._wrap = wrap
        self._wrapped: dict[tuple[int, str], tuple[Function, Function]] = {}
        self._ours: set[Function] = set()
        self._undo: list[tuple[Any, str, Any, Any]] = []

    def install(self) -> None:
        if "transformers" not in sys.modules:
            return
        utils = importlib.import_module("transformers.modeling_utils")
        kind = type(utils.ALL_ATTENTION_FUNCTIONS)
        look_up = kind.__getitem__

        def __getitem__(table: Any, key: str) -> Function:  # noqa: N807  a method in the making
            return self._over(look_up(table, key), key)

        self._set(kind, "__getitem__", __getitem__)
        if not hasattr(kind, "get_interface"):
            self._install_version_4()
            return
        below = kind.get_interface

        def get_interface(table: Any, attn_implementation: str, default: Function) -> Function:
            found = below(table, attn_implementation, default)
            return self._over(found, attn_implementation or "eager")

        self._set(kind, "get_interface", get_interface)

    def _install_version_4(self) -> None:
        for name, module in list(sys.modules.items()):
            eager = getattr(module, "__dict__", {}).get("eager_attention_forward")
            if name.startswith("transformers.models.") and callable(eager):
                self._set(module, "eager_attention_forward", self._over(eager, "eager"))

    def _set(self, owner: Any, name: str, new: Any) -> None:
        self._undo.append((owner, name, owner.__dict__.get(name), new))
        setattr(owner, name, new)

    def remove(self) -> None:
        for owner, name, old, new in reversed(self._undo):
            if owner.__dict__.get(name) is not new:
                continue
            if old is None:
                delattr(owner, name)
            else:
                setattr(owner, name, old)
        self._undo, self._wrapped, self._ours = [], {}, set()

    def _over(self, found: Function, name: str) -> Function:
        if found in self._ours:
            return found
        key = (id(found), name)
        if key not in self._wrapped:  # the function is kept, so that its id stays its own
            self._wrapped[key] = (found, self._wrap(found, name))
            self._ours.add(self._wrapped[key][1])
        return self._wrapped[key][1]


def describe(
    name: str, function: Function, module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Any = None, *args: Any, scaling: Any = None, is_causal: bool | None = None,
    position_bias: Tensor | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, sliding_window: int | None = None, **rest: Any,
) -> Call | None:  # fmt: skip
    """The call as ours; None where only the function itself knows."""
    T, S, D = query.shape[2], key.shape[2], query.shape[3]
    scale = D**-0.5 if scaling is None else scaling
    if isinstance(scale, Tensor) and scale.numel() == 1:
        query, scale = query * scale, 1.0
    sinks = s_aux if s_aux is not None else getattr(module, "sinks", None)
    if name == "eager":
        if not understood(function):
            return None
        mask = attention_mask if attention_mask is None else attention_mask[..., :S]
        return Call(query, key, scale, _joined(mask, position_bias), softcap=softcap, sinks=sinks)
    if name == "flex_attention":
        mask = _flex_mask(attention_mask, query.shape[:3], S)
        return Call(query, key, scale, _joined(mask, position_bias), softcap=softcap, sinks=sinks)
    causal = bool(
        T > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    )
    mask = attention_mask
    if mask is not None and mask.dim() == 2:  # which keys are no padding
        mask = mask.bool()[:, None, None, :S]
    left = None if sliding_window is None else sliding_window - 1
    return Call(query, key, scale, mask, causal, S - T, left, None, softcap, sinks)


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
