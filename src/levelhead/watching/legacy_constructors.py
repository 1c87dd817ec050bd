"""Tensor subclasses that are created by torch's old constructor, while a dispatch mode is active.

torch cannot create `class Mask(torch.Tensor)` as `Mask(2, 3)` under any dispatch mode: the mode makes a plain Tensor of
what should become a Mask. `torch.nn.attention.bias.CausalBias` is such a class. While a mode is active, these classes
have a `__new__` that turns modes off for the moment of the creation.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes


class LegacyConstructors:
    """The constructors, replaced between the first `hold` and the last `release`."""

    def __init__(self) -> None:
        self._holders = 0
        self._lock = threading.Lock()
        self._classes: list[Any] = []

    def hold(self) -> None:
        with self._lock:
            self._holders += 1
            if self._holders == 1:
                self._classes = [kind for kind in _subclasses(torch.Tensor) if kind.__new__ == torch.Tensor.__new__]
                for kind in self._classes:
                    kind.__new__ = _created

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders == 0:
                for kind in self._classes:
                    del kind.__new__
                self._classes = []


def _created(kind: type[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    with _disable_current_modes():
        return torch.Tensor.__new__(kind, *args, **kwargs)


def _subclasses(kind: Any) -> Iterator[Any]:
    for child in kind.__subclasses__():
        yield child
        yield from _subclasses(child)


LEGACY_CONSTRUCTORS = LegacyConstructors()
