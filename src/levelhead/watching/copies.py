"""Copies of a watched model have nothing of the watch: pickled, saved, deep-copied or scripted.

A copy has no hooks of the watch and holds no wrappers, so it can be loaded where levelhead is not installed. The
original stays watched.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from levelhead.torch.swap import Function
from levelhead.watching.module_stack import ATTRIBUTE

_HOOKS = {
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
}  # and what else knows their numbers
_OURS = __name__.rpartition(".")[0]


def reduce_over(original: Callable[..., Any], original_of: Callable[[Any], Any]) -> Callable[..., Any]:
    """`nn.Module.__reduce_ex__`, which pickle and copy call."""

    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        reduced = original(self, protocol)
        if ATTRIBUTE not in vars(self) and not any(_ours(vars(self).get(name) or {}) for name in _HOOKS):
            return reduced
        if not isinstance(reduced, tuple):
            return reduced
        return tuple(_clean(part, original_of) for part in reduced)

    return reduce_ex


def _clean(part: Any, original_of: Callable[[Any], Any]) -> Any:
    """A part of what describes a module, with its attributes as they are without a watch."""
    if type(part) is tuple:
        return tuple(_clean(one, original_of) for one in part)
    if not isinstance(part, dict) or "_modules" not in part:
        return part
    attributes = {name: original_of(x) for name, x in part.items() if name != ATTRIBUTE}
    for name, others in _HOOKS.items():
        ours = _ours(attributes.get(name) or {})
        for each in (name, *others) if ours else ():
            kept = {number: x for number, x in (attributes.get(each) or {}).items() if number not in ours}
            attributes[each] = OrderedDict(kept)
    return attributes


def _ours(hooks: Any) -> set[int]:
    """Numbers of a watch's hooks, and of those of its listeners (`of_a_watch`). Hooks of a remedy are the model's: a
    copy is remedied, too."""
    homes = {number: str(getattr(hook, "__module__", "")) for number, hook in hooks.items()}
    ours = {number for number, home in homes.items() if home.startswith(_OURS) and home != f"{_OURS}.amend"}
    return ours | {n for n, hook in hooks.items() if getattr(getattr(hook, "__self__", None), "of_a_watch", False)}


def script_over(original: Function, lifted: Callable[[], AbstractContextManager[None]]) -> Function:
    """`torch.jit.script`, which reads functions and hooks as code."""

    @functools.wraps(original)
    def script(obj: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["_frames_up"] = kwargs.get("_frames_up", 0) + 1
        with lifted(), _unhooked(obj):
            return original(obj, *args, **kwargs)

    return script


@contextmanager
def _unhooked(obj: Any) -> Iterator[None]:
    """A model as it is without a watch, while the block runs."""
    modules = list(obj.modules()) if isinstance(obj, nn.Module) else []
    tables = [(vars(m)[name], _ours(vars(m)[name])) for m in modules for name in _HOOKS if name in vars(m)]
    before = [(hooks, list(hooks.items())) for hooks, ours in tables if ours]
    marks = [(m, vars(m).pop(ATTRIBUTE)) for m in modules if ATTRIBUTE in vars(m)]
    for hooks, ours in tables:
        for number in ours:
            del hooks[number]
    try:
        yield
    finally:
        for hooks, items in before:
            hooks.clear()
            hooks.update(items)
        for module, watched in marks:
            object.__setattr__(module, ATTRIBUTE, watched)
