"""The hooks of a watch, on every module of its model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from levelhead.watching import compiled, following, module_stack
from levelhead.watching.module_stack import ATTRIBUTE, WatchedModule


def _root_begins(module: nn.Module, args: Any) -> None:
    watched = getattr(module, ATTRIBUTE, None)
    if module_stack.exporting():
        return
    if watched is not None and torch.compiler.is_compiling():
        compiled.trace_forward(watched)
    elif watched is not None and watched.module is module:
        watched.watch.begin_forward()


def hooked(model: nn.Module, watched_modules: Sequence[WatchedModule]) -> Iterator[Any]:
    """Registers them; what removes each."""
    framed = {id(watched.module) for watched in watched_modules}
    for module in model.modules():
        if id(module) not in framed and not isinstance(module, torch.jit.ScriptModule):  # which take no hooks
            yield _hooked(module.register_forward_hook, module_stack.child_ran)
    for watched in watched_modules:
        object.__setattr__(watched.module, ATTRIBUTE, watched)
        before, after = watched.module.register_forward_pre_hook, watched.module.register_forward_hook
        yield _hooked(before, module_stack.enter, prepend=True)
        yield _hooked(after, module_stack.leave, always_call=True)
        yield _hooked(before, following.begin)
        yield _hooked(after, following.leave, always_call=True)
    yield _hooked(model.register_forward_pre_hook, _root_begins, prepend=True)


_HOOKS = (
    module_stack.child_ran,
    module_stack.enter,
    module_stack.leave,
    _root_begins,
    following.begin,
    following.leave,
)
_NUMBERS = {hook: -1 - n for n, hook in enumerate(_HOOKS)}


def _hooked(register: Callable[..., Any], hook: Callable[..., Any], **options: Any) -> Any:
    """Registers a hook under a number of its own. torch.compile guards on these numbers: with equal numbers, equal
    blocks share a graph, and a graph serves the next watch, too."""
    next_, RemovableHandle.next_id = RemovableHandle.next_id, _NUMBERS[hook]
    try:
        return register(hook, **options)
    finally:
        RemovableHandle.next_id = next_
