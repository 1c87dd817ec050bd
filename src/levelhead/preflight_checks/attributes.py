"""What modules keep in plain attributes, put back after a pass: counters, tensors, containers and objects, such as a
cache, and what these hold. What cannot be copied is named."""

from __future__ import annotations

import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from logging import Logger
from random import Random
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset

from levelhead.errors import bad_value

# Attributes that torch keeps in every module, or that others put back. Buffers are put back with the rest.
_OF_TORCH = set(vars(nn.Module())) - {"_buffers"}
_MOST = 50_000  # own: objects that are copied; a module may refer to a whole program
_CODE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_OF_OTHERS = (nn.Parameter, Logger, torch.optim.Optimizer, Dataset, DataLoader)  # a pass writes into none of them
_GENERATORS: tuple[tuple[type, Callable[[Any], Any], Callable[[Any, Any], Any]], ...] = (
    (torch.Generator, torch.Generator.get_state, torch.Generator.set_state),
    (Random, Random.getstate, Random.setstate),
    (np.random.Generator, lambda x: x.bit_generator.state, lambda x, state: setattr(x.bit_generator, "state", state)),
)

Undo: TypeAlias = Callable[[], Any]


class Kept:
    """The attributes of all modules of a model at one time."""

    def __init__(self, model: nn.Module) -> None:
        self.unknown: dict[str, str] = {}  # what is not put back, and its type
        self._undo: list[Undo] = []
        modules = dict(model.named_modules())
        self._seen: dict[int, Any] = {id(module): module for module in modules.values()}  # ids stay taken
        for path, module in modules.items():
            attributes = {name: x for name, x in vars(module).items() if name not in _OF_TORCH}
            self._undo.append(_attributes_back(module, type(module), attributes))
            for name, x in attributes.items():
                self._keep(x, f"{path}.{name}" if path else name)

    def put_back(self) -> None:
        for undo in self._undo:
            undo()

    def _keep(self, x: Any, where: str) -> None:
        """Goes through everything that can be reached; not by recursion, which has a depth."""
        todo = [(where, x)]
        while todo:
            where, x = todo.pop()
            if x is None or id(x) in self._seen or isinstance(x, (int, float, str, bytes, *_CODE, *_OF_OTHERS)):
                continue
            if type(x).__module__.startswith("levelhead."):
                continue  # a watch, which notes the pass
            if len(self._seen) > _MOST:
                self.unknown[where] = "more objects than are copied"
                return
            self._seen[id(x)] = x
            undo = _undo(x)
            if undo is not None:
                self._undo.append(undo)
            elif hasattr(type(x), "__next__"):
                self.unknown[where] = type(x).__name__
            todo += [(f"{where}{name}", part) for name, part in _parts(x)]


def check_numbers(model: nn.Module) -> None:
    """Refuses a model without numbers."""
    for name, x in [*model.named_parameters(), *model.named_buffers()]:
        if x.is_meta:
            given = f"one on the meta device ({name} has a shape and no numbers)"
            advice = "Load its weights, or call model.to_empty(device='cpu') and initialise them"
            raise bad_value("model", "one with numbers in its parameters and buffers", given, advice)


def name_unknown(unknown: Callable[[str, str, str], None], model: nn.Module) -> None:
    """A check that is not judged, if something cannot be put back."""
    if found := Kept(model).unknown:
        listed = ", ".join(f"{where} ({kind})" for where, kind in found.items())[:200]
        unknown("attributes put back", "what modules keep", f"{listed}: no copy is possible, passes may change it")


def _parts(x: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(x, dict):
        yield from ((f"[{key!r}]"[:40], part) for key, part in dict.items(x))
    elif isinstance(x, list | tuple | deque | set | frozenset):
        yield from ((f"[{n}]", part) for n, part in enumerate(x))
    if not isinstance(x, Tensor):
        yield from ((f".{name}", part) for name, part in _fields(x).items())


def _fields(x: Any) -> dict[str, Any]:
    """The attributes of an object, those in slots too."""
    slots = [name for kind in type(x).__mro__ for name in _slots(kind) if not name.startswith("__")]
    fields = {name: getattr(x, name) for name in slots if _holds(x, name)}
    return fields | (x.__dict__ if isinstance(getattr(x, "__dict__", None), dict) else {})


def _slots(kind: type) -> tuple[str, ...]:
    found = kind.__dict__.get("__slots__", ())
    return (found,) if isinstance(found, str) else tuple(found)


def _holds(x: Any, name: str) -> bool:
    return isinstance(getattr(type(x), name, None), types.MemberDescriptorType) and hasattr(x, name)


def _undo(x: Any) -> Undo | None:
    """What gives an object the content that it has now; None: it has none, or it cannot be copied."""
    if isinstance(x, Tensor):
        known = not is_lazy(x) and not x.is_meta and x.layout is torch.strided
        return _tensor_back(x, x.detach().clone()) if known else None
    if isinstance(x, np.ndarray):
        return _array_back(x, x.copy())
    for kind, read, write in _GENERATORS:
        if isinstance(x, kind):
            state = read(x)
            return lambda: write(x, state)
    fields = _fields(x)
    back = _fields_back(x, fields) if fields or hasattr(x, "__dict__") else None
    held = _content_back(x)
    if back is None or held is None:
        return back or held
    return lambda: (back(), held())[0]


def _content_back(x: Any) -> Undo | None:
    """Of a container that can change."""
    if not isinstance(x, dict | list | set | deque):
        return None
    before = _flat(x)

    def undo() -> None:
        if [id(part) for part in _flat(x)] == [id(part) for part in before]:
            return
        x.clear()
        if isinstance(x, dict):
            setting = _own(x).__setitem__  # that of a subclass may do more
            for key, part in zip(before[::2], before[1::2], strict=True):
                setting(x, key, part)
        elif isinstance(x, set):
            x.update(before)
        else:
            x.extend(before)

    return undo


def _own(x: dict[Any, Any]) -> type[dict[Any, Any]]:
    """The type whose methods know the order of a dict."""
    return OrderedDict if isinstance(x, OrderedDict) else dict


def _flat(x: Any) -> list[Any]:
    """The members; of a dict a key, its value, and so on."""
    return [part for pair in _own(x).items(x) for part in pair] if isinstance(x, dict) else list(x)


def _array_back(x: np.ndarray[Any, Any], content: np.ndarray[Any, Any]) -> Undo:
    def undo() -> None:
        if x.flags.writeable:
            x[...] = content

    return undo


def _fields_back(x: Any, before: dict[str, Any]) -> Undo:
    def undo() -> None:
        now = _fields(x)
        for name in now.keys() - before.keys():
            object.__delattr__(x, name)
        for name, part in before.items():
            if name not in now or now[name] is not part:
                object.__setattr__(x, name, part)

    return undo


def _tensor_back(x: Tensor, content: Tensor) -> Undo:
    def undo() -> None:
        if x.shape != content.shape:
            x.data = content
        elif not torch.equal(x, content):
            with torch.inference_mode(x.is_inference()):
                x.copy_(content)

    return undo


def _attributes_back(module: nn.Module, kind: type, before: dict[str, Any]) -> Undo:
    def undo() -> None:
        attributes = vars(module)
        if type(module) is not kind:  # a lazy module has become another
            return
        for name in attributes.keys() - before.keys() - _OF_TORCH:
            del attributes[name]
        attributes.update(before)

    return undo
