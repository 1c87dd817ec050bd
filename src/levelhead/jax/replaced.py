"""Functions and methods that something else stands in for while a model is traced.

A replacement is seen by every thread; whether it does anything is up to what the thread that calls it is doing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

Replacements: TypeAlias = Iterable[tuple[Any, str, Any]]  # owner, attribute, what stands there meanwhile
_lock = threading.Lock()
_replaced: dict[tuple[Any, str], tuple[Any, int]] = {}  # what stood there, and how many passes have it replaced


@contextmanager
def in_place(replacements: Callable[[], Replacements]) -> Iterator[None]:
    """Threads that watch at the same time share what stands in place; the last one puts back what stood there."""
    places: list[tuple[Any, str]] = []
    try:
        with _lock:
            for owner, name, instead in replacements():
                place = (owner, name)
                before, users = _replaced.get(place, (vars(owner)[name], 0))
                _replaced[place] = (before, users + 1)
                places.append(place)
                if not users:
                    setattr(owner, name, instead)
        yield
    finally:
        with _lock:
            for place in places:
                before, users = _replaced.pop(place)
                if users > 1:
                    _replaced[place] = (before, users - 1)
                else:
                    setattr(*place, before)
