"""How `nn.MultiheadAttention` reaches `F.scaled_dot_product_attention`, for those that replace that function.

In evaluation its native fast path does not call it: `FastPathOff`. Dynamo puts `F.multi_head_attention_forward` into a
graph as one call, and traces what is inside only when it lowers the graph, behind all guards: `traced` is a function of
the same code that Dynamo traces.
"""

from __future__ import annotations

import threading
from types import FunctionType

import torch
from torch.nn import functional

from levelhead.torch.swap import Function


class FastPathOff:
    """Switches the native fast path off between the first `hold` and the last `release`, whoever they are from.

    Compiled graphs of the module have a guard on this switch: they are compiled again when it changes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._before = True

    def hold(self) -> None:
        with self._lock:
            self._holders += 1
            if self._holders == 1:
                self._before = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            if not self._holders:
                torch.backends.mha.set_fastpath_enabled(self._before)


FAST_PATH_OFF = FastPathOff()


def traced(original: Function) -> Function:
    """A copy of `F.multi_head_attention_forward` that Dynamo does not know."""
    copy = FunctionType(original.__code__, original.__globals__, original.__name__, original.__defaults__)
    copy.__kwdefaults__ = original.__kwdefaults__
    return copy


MULTIHEAD = functional.multi_head_attention_forward
TRACED_MULTIHEAD = traced(MULTIHEAD)
