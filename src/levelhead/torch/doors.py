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

__all__ = ["Doors"]


class Doors:
    """`get_interface` gives a module what it asks for, its own eager function included; `[name]`
    is how older versions ask, and some modules still do.

    `called(original, eager, module, ...)` is what runs instead of original(module, ...).
    """

    def __init__(self, called: Callable[..., Any]) -> None:
        self._called = called
        self._users = 0
        self._doors: dict[str, Any] = {}

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
        kind = self._kind()
        self._users += 1
        if self._users > 1:
            return
        doors: dict[str, Any] = {"__getitem__": _getitem(kind.__getitem__, self._called)}
        if self.has_eager():
            doors["get_interface"] = _get_interface(kind.get_interface, self._called)
        self._doors = {name: (kind.__dict__.get(name), door) for name, door in doors.items()}
        for name, door in doors.items():
            setattr(kind, name, door)

    def remove(self) -> None:
        self._users -= 1
        if self._users:
            return
        kind = self._kind()
        for name, (before, door) in self._doors.items():
            if kind.__dict__.get(name) is not door:
                continue  # somebody has wrapped it since: it passes everything through
            if before is None:
                delattr(kind, name)
            else:
                setattr(kind, name, before)


def _getitem(original: Any, called: Any) -> Any:
    def __getitem__(self: Any, name: str) -> Any:  # noqa: N807
        return functools.partial(called, original(self, name), False)

    return __getitem__


def _get_interface(original: Any, called: Any) -> Any:
    def get_interface(self: Any, attn_implementation: Any, default: Any) -> Any:
        found = original(self, attn_implementation, default)
        return functools.partial(called, default, True) if found is default else found

    return get_interface
