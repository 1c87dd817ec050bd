"""Functions that a model holds: in attributes, dictionaries, default arguments, closures, partials.

Replacing a function by name, as `swap` does, does not reach such a reference. Here the objects that a model leads to
are walked, and every reference found is replaced, until `undo`. Objects of libraries are not entered.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor, nn

from levelhead.torch.swap import Function

_OBJECTS = 50_000  # a walk ends here
_LARGE = 1_000  # entries of a container that is data, not a table of functions
_LIBRARIES = ("torch", "numpy", "transformers", "levelhead", "flash_attn", "xformers", "transformer_engine")
_OWN = frozenset(vars(nn.Module())) - {"training"}  # what every module has: parameters, children, hooks


class _Place(NamedTuple):
    """Where an object holds another one."""

    holder: Any
    name: Any
    put: Callable[[Any], None]


_replaced: dict[tuple[int, Any], list[Any]] = {}  # (holder, name) -> [users, what was there, place]


class Held:
    """Replaces what the roots hold: `instead` gives a function in the place of an object, or None."""

    def __init__(self, roots: Iterable[Any], instead: Callable[[Any], Function | None]) -> None:
        self._places: list[tuple[int, Any]] = []
        seen: set[int] = set()
        waiting = [(root, _Place(None, None, _ignore)) for root in roots]
        while waiting and len(seen) < _OBJECTS:
            value, place = waiting.pop()
            new = instead(value)
            key = (id(place.holder), place.name)
            if new is not None:
                if place.holder is not None:
                    _replaced[key] = [1, value, place]
                    self._places.append(key)
                    place.put(new)
            elif key in _replaced:
                _replaced[key][0] += 1
                self._places.append(key)
            elif id(value) not in seen and not isinstance(value, _PLAIN):
                seen.add(id(value))
                waiting.extend(_held_by(value, place))

    def undo(self) -> None:
        """Puts back what no other user has replaced, too."""
        for key in self._places:
            entry = _replaced.get(key)
            if entry is None:
                continue
            entry[0] -= 1
            if entry[0] == 0:
                entry[2].put(entry[1])
                del _replaced[key]
        self._places = []


_PLAIN = (Tensor, str, bytes, int, float, complex, type(None), ModuleType, CellType)


def _ignore(new: Any) -> None:
    pass


def _held_by(value: Any, place: _Place) -> Iterator[tuple[Any, _Place]]:
    """What an object holds, and where."""
    if isinstance(value, dict):
        yield from _entries(value)
    elif isinstance(value, list):
        if len(value) <= _LARGE:
            for index, item in enumerate(value):
                yield item, _Place(value, index, functools.partial(value.__setitem__, index))
    elif isinstance(value, tuple):
        yield from _of_tuple(value, place)
    elif isinstance(value, functools.partial):
        yield from _of_partial(value)
    elif isinstance(value, MethodType):
        yield value.__func__, _Place(None, None, _ignore)
        yield value.__self__, _Place(None, None, _ignore)
    elif isinstance(value, FunctionType):
        yield from _of_function(value)
    elif isinstance(value, type):
        yield from _of_class(value)
    elif isinstance(value, nn.Module):
        yield from ((x, at) for x, at in _entries(vars(value)) if at.name not in _OWN)
        yield type(value), _Place(None, None, _ignore)
    elif isinstance(value, SimpleNamespace) or not _is_of_library(type(value)):
        yield from _entries(getattr(value, "__dict__", {}))
        for name in _slots(type(value)):
            if hasattr(value, name):
                yield getattr(value, name), _Place(value, name, functools.partial(object.__setattr__, value, name))
        yield type(value), _Place(None, None, _ignore)


def _entries(table: Any) -> Iterator[tuple[Any, _Place]]:
    if isinstance(table, dict) and len(table) <= _LARGE:
        for name, item in list(table.items()):
            if isinstance(name, str | int | tuple):
                yield item, _Place(table, name, functools.partial(table.__setitem__, name))


def _of_tuple(value: tuple[Any, ...], place: _Place) -> Iterator[tuple[Any, _Place]]:
    """A tuple is replaced as a whole, where it is held."""
    current = list(value)

    def put(index: int, new: Any) -> None:
        current[index] = new
        make = getattr(type(value), "_make", tuple)
        place.put(make(current))

    if len(value) <= _LARGE:
        for index, item in enumerate(value):
            yield item, _Place(value, index, functools.partial(put, index))


def _of_partial(value: functools.partial[Any]) -> Iterator[tuple[Any, _Place]]:
    def state(**changed: Any) -> None:
        now = {"func": value.func, "args": value.args, "keywords": value.keywords, "dict": vars(value)} | changed
        value.__setstate__((now["func"], now["args"], now["keywords"], now["dict"]))  # type: ignore[attr-defined]

    yield value.func, _Place(value, "func", lambda new: state(func=new))
    yield value.args, _Place(value, "args", lambda new: state(args=new))
    yield from _entries(value.keywords)


def _of_function(function: FunctionType) -> Iterator[tuple[Any, _Place]]:
    if is_of_library(str(function.__globals__.get("__name__"))):
        return
    if function.__defaults__:
        yield function.__defaults__, _Place(function, "__defaults__", lambda new: _set(function, "__defaults__", new))
    yield from _entries(function.__kwdefaults__ or {})
    for cell in function.__closure__ or ():
        try:
            inside = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        yield inside, _Place(cell, "", functools.partial(_set, cell, "cell_contents"))
    yield from _entries(vars(function))
    known = getattr(sys.modules.get(function.__module__ or ""), "__dict__", None) is function.__globals__
    for name in names_in(function):
        if name in function.__globals__:
            put = _ignore if known else functools.partial(function.__globals__.__setitem__, name)
            yield function.__globals__[name], _Place(None if known else function.__globals__, name, put)


def names_in(function: FunctionType) -> set[str]:
    """The names that its code looks up."""
    codes = [function.__code__]
    for code in codes:  # grows as nested functions join
        codes += [constant for constant in code.co_consts if hasattr(constant, "co_names")]
    return {name for code in codes for name in code.co_names}


def _of_class(kind: type) -> Iterator[tuple[Any, _Place]]:
    for base in kind.__mro__:
        if _is_of_library(base):
            continue
        for name, item in list(vars(base).items()):
            inner = item.__func__ if isinstance(item, staticmethod | classmethod) else item
            inner = inner.fget if isinstance(inner, property) else inner
            yield inner, _Place(base, name, functools.partial(_set_attribute, base, name, item))


def _set_attribute(kind: type, name: str, found: Any, new: Any) -> None:
    """A builtin, unlike a function, does not become a method."""
    if isinstance(found, staticmethod | BuiltinFunctionType):
        setattr(kind, name, found if new is found else staticmethod(new))
    elif isinstance(found, FunctionType):
        setattr(kind, name, new)


def _set(holder: Any, name: str, new: Any) -> None:
    setattr(holder, name, new)


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        yield from (n for n in ((names,) if isinstance(names, str) else names) if not n.startswith("__"))


def _is_of_library(x: Any) -> bool:
    return is_of_library(str(getattr(x, "__module__", None) or ""))


def is_of_library(module: str) -> bool:
    """Whether a module's name is that of a library whose objects are not entered."""
    root = module.partition(".")[0]
    return root in _LIBRARIES or (root in sys.stdlib_module_names and root != "__main__")
