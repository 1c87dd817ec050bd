"""Puts functions in the place of others, wherever those were imported, and back again.

Several swaps may lie on top of each other and may be undone in any order: a swap that goes leaves
what it found, seen through the swaps that stay.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

Function: TypeAlias = Callable[..., Any]

_active: list[Swap] = []  # from the lowest to the topmost


class Swap:
    """Holds until `undo`. `instead` says what each function is replaced by; modules named in
    `kept` keep theirs. A module that is first imported in between keeps what it found."""

    def __init__(self, instead: Mapping[Function, Function], kept: Collection[str]) -> None:
        self.instead = dict(instead)
        self._found: dict[tuple[int, str], tuple[dict[str, Any], Function]] = {}
        by_identity = {id(old): new for old, new in self.instead.items()}
        for module in list(sys.modules.values()):
            names = getattr(module, "__dict__", None)
            if not isinstance(names, dict) or getattr(module, "__name__", "") in kept:
                continue
            for name, value in list(names.items()):
                if id(value) in by_identity:
                    self._found[id(names), name] = (names, value)
                    names[name] = by_identity[id(value)]
        _active.append(self)

    def undo(self) -> None:
        """Puts everything back; a second time does nothing."""
        if self not in _active:
            return
        above = _active[_active.index(self) + 1 :]
        _active.remove(self)
        for (place, name), (names, old) in self._found.items():
            over = next((swap for swap in above if (place, name) in swap._found), None)
            if over is None:
                if names.get(name) is self.instead[old]:
                    names[name] = old
                continue
            shown = names.get(name) is over.instead[over._found[place, name][1]]
            over._found[place, name] = (names, old)
            if shown and old in over.instead:
                names[name] = over.instead[old]
        self._found = {}
