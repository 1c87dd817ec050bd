"""Tensors that are made to be filled, and their views: what is written into a view is in the whole."""

from __future__ import annotations

from typing import Any
from weakref import ref

from torch import Tensor

from levelhead.watching.scores import VIEWS
from levelhead.watching.tensor_table import TensorTable

_MADE_NAMES = "empty zeros full ones new_empty new_zeros new_full new_ones empty_like zeros_like full_like ones_like"
_MADE = set(_MADE_NAMES.split())


class Buffers:
    """Of one pass."""

    def __init__(self) -> None:
        self._wholes: TensorTable[Any] = TensorTable()  # a buffer, or a view of one -> a weak reference to the buffer

    def follow(self, name: str, args: tuple[Any, ...], out: Any) -> None:
        """Follows an operator that makes a buffer or a view."""
        if name in _MADE and isinstance(out, Tensor):
            self._wholes[out] = ref(out)
        elif name in VIEWS and (whole := self._wholes.get(args[0])) is not None:
            for x in out if isinstance(out, list | tuple) else (out,):
                self._wholes[x] = whole

    def whole(self, x: Tensor) -> Tensor | None:
        """The buffer that x is a view of; None: it is none."""
        reference = self._wholes.get(x)
        found: Tensor | None = None if reference is None else reference()
        return None if found is x else found
