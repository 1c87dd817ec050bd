"""transformers' attention interface, held open while somebody uses levelhead.

An attention module asks the interface for the function to call, through one of two doors. While
there are users, what comes out of either is the function itself within `called`, which decides by
the module. What `called` decides is none of this file's business; when the last user leaves, the
interface is as it was.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from levelhead.errors import LevelheadValueError, expected
from levelhead.torch.swap import Layer, innermost, within, wraps

__all__ = ["Doors"]


class Doors:
    """`get_interface` gives a module what it asks for, its own eager function included; `[name]`
    is how older versions ask, and some modules still do.

    `called(original, eager, module, ...)` is what runs instead of original(module, ...).
    """

    def __init__(self, called: Callable[..., Any]) -> None:
        self._called = called
        self._users = 0
        self._layers: list[Layer] = []

    @staticmethod
    def _kind() -> Any:
        try:
            from transformers import AttentionInterface
        except ImportError as error:
            advice = 'pip install "levelhead[models]"'
            wanted = "transformers 4.48 or newer to be installed"
            raise LevelheadValueError(expected("model", wanted, error, advice)) from error
        return AttentionInterface

    def has_eager(self) -> bool:
        return hasattr(self._kind(), "get_interface")

    def install(self) -> None:
        kind, called = self._kind(), self._called  # before anything counts: it may be missing
        self._users += 1
        if self._users > 1:
            return
        self._layers = [Layer(kind, "__getitem__", lambda below: _getitem(below, called))]
        if self.has_eager():
            wrap = functools.partial(_get_interface, called=called)
            self._layers.append(Layer(kind, "get_interface", wrap))

    def remove(self) -> None:
        self._users -= 1
        if self._users:
            return
        for layer in self._layers:
            layer.undo()
        self._layers = []


def _getitem(original: Any, called: Any) -> Any:
    def __getitem__(self: Any, name: str) -> Any:  # noqa: N807
        found = original(self, name)
        if wraps(found, called):
            return found
        return within(found, lambda f: functools.partial(called, f, False))

    return __getitem__


def _get_interface(original: Any, called: Any) -> Any:
    def get_interface(self: Any, attn_implementation: Any, default: Any) -> Any:
        found = original(self, attn_implementation, default)
        if wraps(found, called) or innermost(found) is not default:
            return found
        return within(found, lambda f: functools.partial(called, f, True))

    return get_interface
