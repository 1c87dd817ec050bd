"""Hooks on transformers' attention functions: the one way in which levelhead observes or replaces their calls.

An attention module gets its function from transformers' `AttentionInterface`. Version 5 has `get_interface`, which also
returns a module's own eager function; version 4, and some modules still, use `[name]`, and call eager functions by
name. While a hook is installed, these return the function inside a wrapper. When the last user has removed the hook,
the interface is as it was.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import nn

from levelhead.errors import bad_value
from levelhead.extras import command, need
from levelhead.torch.swap import Function, Layer, within, wraps

_EAGER = "eager_attention_forward"


class AttentionHook:
    """Runs called(function, name, module, ...) instead of function(module, ...); `name` is that of the implementation,
    "eager" for a module's own function.

    An observer wraps what others have wrapped. A replacement (`replaces=True`) lies inside all observers, so that they
    see the calls it receives; eager functions of version 4 are observed, not replaced.
    """

    def __init__(self, called: Callable[..., Any], *, replaces: bool = False) -> None:
        self._called, self._replaces = called, replaces
        self._users = 0
        self._layers: list[Layer] = []

    def install(self) -> None:
        """Adds a user; the first one installs the wrappers."""
        interface = _interface()  # before anything counts: it may be missing
        self._users += 1
        if self._users > 1:
            return
        self._layers = [Layer(interface, "__getitem__", self._getitem)]
        if has_get_interface():
            self._layers.append(Layer(interface, "get_interface", self._get_interface))
        elif not self._replaces:
            eager = functools.partial(self._wrapped, name="eager")
            modules = [module for name, module in list(sys.modules.items()) if name.startswith("transformers.models.")]
            functions = [module for module in modules if callable(getattr(module, "__dict__", {}).get(_EAGER))]
            self._layers += [Layer(module, _EAGER, eager) for module in functions]

    def remove(self) -> None:
        """Removes a user; the last one removes the wrappers."""
        self._users -= 1
        if self._users:
            return
        for layer in self._layers:
            layer.undo()
        self._layers = []

    def _getitem(self, below: Function) -> Function:
        def __getitem__(table: Any, name: str) -> Function:  # noqa: N807  becomes a method
            return self._wrapped(below(table, name), name)

        return __getitem__

    def _get_interface(self, below: Function) -> Function:
        def get_interface(table: Any, attn_implementation: str | None, default: Function) -> Function:
            return self._wrapped(below(table, attn_implementation, default), attn_implementation or "eager")

        return get_interface

    def _wrapped(self, function: Function, name: str) -> Function:
        if wraps(function, self._called):
            return function
        if self._replaces:
            return within(function, lambda innermost: functools.partial(self._called, innermost, name))
        return functools.partial(self._called, function, name)


@contextmanager
def observed_calls(model: nn.Module, observe: Callable[..., None]) -> Iterator[None]:
    """While the block runs, observe(name, module, ...) precedes every attention call of the model's modules."""
    own = set(map(id, model.modules()))

    def called(function: Function, name: str, module: nn.Module, *args: Any, **options: Any) -> Any:
        if id(module) in own:
            observe(name, module, *args, **options)
        return function(module, *args, **options)

    hook = AttentionHook(called)
    hook.install()
    try:
        yield
    finally:
        hook.remove()


def has_get_interface() -> bool:
    """Whether modules ask this transformers for their eager functions, too."""
    return hasattr(_interface(), "get_interface")


@functools.cache
def sdpa_function() -> Function:
    """The function that transformers itself has for "sdpa"."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return cast(Function, sdpa_attention_forward)


def _interface() -> Any:
    transformers = need("model", "transformers", install=command("models"))
    try:
        return transformers.AttentionInterface
    except AttributeError as error:
        given = f"transformers {transformers.__version__}"
        raise bad_value("model", "transformers 4.48 or newer", given, f"Run: {command('models')}") from error
