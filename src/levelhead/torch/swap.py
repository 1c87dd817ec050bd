"""Puts functions in the place of others, wherever those were imported, and back again.

Several swaps may lie on top of each other and may be undone in any order: a swap that goes leaves what it found, seen
through the swaps that stay. The same for wrappers over an attribute.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeAlias

Function: TypeAlias = Callable[..., Any]

_active: list[Swap] = []  # from the lowest to the topmost
_lifting = threading.Lock()


def showing(functions: Collection[Function]) -> list[ModuleType]:
    """The modules that show any of these functions now. With large libraries loaded a look through all takes 5 ms."""
    wanted = {id(function) for function in functions}
    modules = list(sys.modules.values()) if wanted else []
    return [module for module in modules if not wanted.isdisjoint(map(id, list(_names(module).values())))]


def _names(module: Any) -> dict[str, Any]:
    names = getattr(module, "__dict__", None)
    return names if isinstance(names, dict) else {}


class Swap:
    """Holds until `undo`. `instead` says what each function is replaced by; modules named in
    `kept` keep theirs. A module that is first imported in between keeps what it found.
    `among`: what `showing` found; several swaps that are made together share one look."""

    def __init__(
        self, instead: Mapping[Function, Function], kept: Collection[str], among: Collection[ModuleType]
    ) -> None:
        self.instead = dict(instead)
        self._found: dict[tuple[int, str], tuple[dict[str, Any], Function]] = {}
        self._lifts = 0
        by_identity = {id(old): new for old, new in self.instead.items()}
        for module in among:
            names = module.__dict__
            if getattr(module, "__name__", "") in kept:
                continue
            for name, value in list(names.items()):
                if id(value) in by_identity:
                    self._found[id(names), name] = (names, value)
                    names[name] = by_identity[id(value)]
        over = self._go_below(kept)
        _active.insert(len(_active) if over is None else _active.index(over), self)

    def _go_below(self, kept: Collection[str]) -> Swap | None:
        """Takes the places where another swap shows its replacement of the same function, and lies below that swap: it
        then replaces what this one puts there. The lowest of such swaps, if there is one."""
        lowest = None
        for over in _active:
            others = [(place, over._found[place]) for place in over._found.keys() - self._found.keys()]
            taken = [x for x in others if x[1][1] in self.instead and x[1][0].get("__name__") not in kept]
            for (place, name), (names, old) in taken:
                new = self.instead[old]
                shown = names.get(name) is over.instead[old]
                over._found[place, name] = (names, new)
                over.instead.setdefault(new, over.instead[old])
                self._found[place, name] = (names, old)
                if shown:
                    names[name] = over.instead[new]
            lowest = lowest or (over if taken else None)
        return lowest

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
            instead = over.instead[over._found[place, name][1]]
            shown = names.get(name) is instead
            over._found[place, name] = (names, old)
            over.instead.setdefault(old, instead)
            if shown:
                names[name] = over.instead[old]
        self._found = {}

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Shows the replaced functions again while the block runs, in all threads.

        A tensor subclass may compare the function it receives in `__torch_function__` with the one that a module shows
        now. Both must then be the original. Of the blocks of several threads the first lifts, the last puts back.
        """
        with _lifting:
            self._lifts += 1
            if self._lifts == 1:
                self._show(original=True)
        try:
            yield
        finally:
            with _lifting:
                self._lifts -= 1
                if self._lifts == 0:
                    self._show(original=False)

    def _show(self, *, original: bool) -> None:
        for (_, name), (names, old) in self._found.items():
            new = self.instead[old]
            if names.get(name) is (new if original else old):  # else another swap lies above this one
                names[name] = old if original else new


class Layer:
    """A wrapper around an attribute of a class or module, until `undo`. `wrap` gets the value that it wraps.

    Layers of one attribute wrap each other. When one is undone, the others wrap each other again without it.
    """

    def __init__(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        self._at = (owner, name)
        self._wrap = wrap
        self._base = owner.__dict__.get(name, _MISSING)
        self._below = getattr(owner, name)
        same = [layer for layer in _layers if layer._at == self._at]
        if same and self._base is same[0]._shown:  # all layers have the value below the first of them
            self._base, self._below = same[0]._base, same[0]._below
        self._shown: Any = None  # the attribute's value now: that of the last layer
        _layers.append(self)
        self._lay()

    def undo(self) -> None:
        """Takes the wrapper away; a second time does nothing."""
        if self in _layers:
            _layers.remove(self)
            owner, name = self._at
            if owner.__dict__.get(name) is self._shown:
                self._lay()
            # Else other code has wrapped it since, and putting it back would lose that wrapper.

    def _lay(self) -> None:
        owner, name = self._at
        here = [x for x in _layers if x._at == self._at and x._below is self._below]
        if here:
            shown = functools.reduce(lambda below, layer: layer._wrap(below), here, self._below)
            setattr(owner, name, shown)
            for layer in here:
                layer._shown = shown
        elif self._base is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, self._base)


_MISSING = object()
_layers: list[Layer] = []  # from the lowest to the topmost


# ---- wrappers that are partials: the first argument is what they wrap


def wraps(found: Function, by: Function) -> bool:
    """Whether `by` is one of the wrappers around a function."""
    while isinstance(found, functools.partial):
        if found.func is by:
            return True
        found = found.args[0]
    return False


def within(found: Function, wrap: Callable[[Function], Function]) -> Function:
    """One more wrapper, inside all others, so that these still observe every call."""
    if not isinstance(found, functools.partial):
        return wrap(found)
    inner = within(found.args[0], wrap)
    return functools.partial(found.func, inner, *found.args[1:], **found.keywords)
