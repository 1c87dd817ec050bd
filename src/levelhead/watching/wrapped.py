"""Which functions are wrapped now, and where their wrappers stand in their place.

`Wrapped` has the wrappers that all watches share: by name, in every module that shows a function. `Reach` adds those of
one watch: what it was taught, and every function that its model holds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from levelhead.torch.held import Held, is_of_library
from levelhead.torch.swap import Function, Layer, Swap, showing
from levelhead.watching.functions.table import loaded
from levelhead.watching.intercept_known import known_over, taught_over

_COMPILED = "_torchdynamo_orig_callable"  # of a function that torch.compile returned


class Wrapped:
    """The functions that are wrapped for all watches."""

    def __init__(self, kept: Collection[str]) -> None:
        self.kept = kept
        self._swaps: list[Swap] = []
        self._layers: list[Layer] = []  # over the `forward` of module classes
        self._instead: dict[int, tuple[Any, Function]] = {}  # by id: a function, and its wrapper
        self._makers: dict[int, Callable[[Function], Function]] = {}  # by id: what wraps such a function
        self._originals: dict[int, Any] = {}  # by id of the wrapper

    def begin(
        self, instead: Mapping[Function, Function], makers: Mapping[Function, Callable[..., Function]]
    ) -> dict[Function, Function]:
        """`instead`: what is wrapped already; `makers`: what wraps compiled variants of these. Returns the functions of
        the table and all compiled variants with their wrappers, for `swap`."""
        for function, wrapper in instead.items():
            self._add(function, wrapper)
        self._makers = {id(function): make for function, make in makers.items()}
        return self._wrap_new()

    def extend(self) -> None:
        """Wraps functions of the table that exist and are not wrapped yet, and compiled variants of all."""
        new = self._wrap_new()
        self.swap(new, showing(new))

    def swap(self, new: Mapping[Function, Function], among: Collection[ModuleType]) -> None:
        if new:
            self._swaps.append(Swap(new, self.kept, among))

    def _wrap_new(self) -> dict[Function, Function]:
        new: dict[Function, Function] = {}
        for function, known in loaded():
            if id(function) in self._instead or id(function) in self._originals:
                continue
            if isinstance(function, type):
                self._add(function, function)
                self._layers.append(Layer(function, "forward", partial(known_over, known=known, key=function)))
            else:
                self._makers[id(function)] = partial(known_over, known=known)
                new[function] = self._add(function, known_over(function, known))
        for function in _compiled():
            wrapper = self.instead_of(function)
            if wrapper is not None:
                new[function] = wrapper
        return new

    def end(self) -> None:
        for swap in self._swaps:
            swap.undo()
        for layer in self._layers:
            layer.undo()
        self.__init__(self.kept)  # type: ignore[misc]

    def instead_of(self, x: Any) -> Function | None:
        """The wrapper in the place of a function; None: it stays."""
        if isinstance(x, type) or not callable(x):
            return None
        if id(x) in self._instead:
            return self._instead[id(x)][1]
        inner = getattr(x, _COMPILED, None) if isinstance(x, FunctionType) else None
        make = None if inner is None else self._makers.get(id(inner))
        return None if make is None else self._add(x, make(x))

    def original_of(self, x: Any) -> Any:
        """The function that a wrapper stands for; anything else as it is."""
        return self._originals.get(id(x), x) if callable(x) else x

    def __contains__(self, x: Any) -> bool:
        return id(x) in self._instead

    def _add(self, function: Any, wrapper: Function) -> Function:
        self._instead[id(function)] = (function, wrapper)
        self._originals[id(wrapper)] = function
        return wrapper


def _compiled() -> Iterator[Function]:
    """Functions by torch.compile that modules outside of libraries show."""
    if "torch._dynamo" not in sys.modules:
        return
    for name, module in list(sys.modules.items()):
        if not is_of_library(name):
            for value in list(getattr(module, "__dict__", {}).values()):
                if isinstance(value, FunctionType) and getattr(value, _COMPILED, None) is not None:
                    yield value


class Reach:
    """What one watch adds, until `undo`."""

    def __init__(self, model: nn.Module, taught: Collection[Any], wrapped: Wrapped) -> None:
        new = [x for x in taught if x not in wrapped]
        functions = {x: taught_over(x) for x in new if not isinstance(x, type)}
        self._layers = [Layer(x, "forward", partial(taught_over, key=x)) for x in new if isinstance(x, type)]
        self._swap = Swap(functions, wrapped.kept, showing(functions))
        own = {id(x): wrapper for x, wrapper in functions.items()}
        self._held = Held(model.modules(), lambda x: own.get(id(x)) or wrapped.instead_of(x))

    def undo(self) -> None:
        self._held.undo()
        self._swap.undo()
        for layer in self._layers:
            layer.undo()
