"""Serves a module that calls torch's attention function itself, or writes attention out: within its forward only.

A function mode, which is active in the thread that runs the forward. Inside a graph of `torch.compile` it serves
torch's function; attention that is written out stays there as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from levelhead.torch import sdpa
from levelhead.torch.huggingface.formula import followed

_MULTIHEAD = functional.multi_head_attention_forward


class OwnCalls(TorchFunctionMode):
    """Within the block, levelhead computes what the code attends to; `served` is called for every such attention."""

    def __init__(self, served: Callable[[], None]) -> None:
        super().__init__()
        self.served = served
        self.normalises = False  # whether the code has called a softmax

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is sdpa.ORIGINAL:
            self.served()
            return sdpa.scaled_dot_product_attention(*args, **kwargs)
        self.normalises |= "softmax" in getattr(func, "__name__", "")
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func is _MULTIHEAD:
            with self:
                return _multihead(*args, **kwargs)
        return followed(func, args, kwargs, self.served)


def _open(original: Any) -> Any:
    """The same function without the test for modes, by which it would be one opaque call."""
    names = original.__globals__ | {"has_torch_function": lambda tensors: False}
    copy = FunctionType(original.__code__, names, original.__name__, original.__defaults__)
    copy.__kwdefaults__ = original.__kwdefaults__
    return copy


_multihead = _open(_MULTIHEAD)
