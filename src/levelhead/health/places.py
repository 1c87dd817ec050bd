"""Where a watched model attends: its modules, as they are met while it runs.

Every module that may hold an attention call becomes a place. Hooks keep a stack of the places
that are running, so that a call knows whose it is, and remember what ran inside each. The hooks
are plain functions that find their place on the module, which is what lets `torch.compile` trace
them whole, once. Nothing here measures.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.health.reading import Ran

ATTRIBUTE = "_levelhead_place"
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module")
_HEADS = ("num_heads", "n_heads", "nheads", "heads", "n_head", "num_attention_heads", "nhead")
_numbers = itertools.count(1)
PLACES: dict[int, Place] = {}  # of everything that is watched now, by number


class Place:
    """A module of a watched model."""

    def __init__(self, name: str, module: nn.Module, watch: Any) -> None:
        self.name, self.module, self.watch = name, module, watch
        self.kind = type(module).__name__
        self.number = next(_numbers)
        # Compiled code hands this to the operator, which finds the place by it: a tensor may change
        # without another compilation, and lies on the CPU, so reading it waits for no device.
        self.handle = torch.tensor([self.number, 0])
        self.ran: list[Ran] = []  # inside it, since it was entered
        self.busy = False  # inside a call that is being observed already
        self.open = False  # inside a function whose softmax is to be looked at
        self.via = ""  # inside a function of that name
        self.heads = _heads(module)
        self.attends = sounds_like_attention(module)
        self.calls = 0
        self.entered = 0
        self.ways: dict[str, None] = {}  # through what it was seen, in order
        self.ever_ran: set[str] = set()  # names of children

    def __deepcopy__(self, memo: Any) -> None:
        return None  # a copy of a watched model is not watched

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def sounds_like_attention(module: nn.Module) -> bool:
    """Whether its class, or one above, is called so."""
    names = [base.__name__.lower() for base in type(module).__mro__[:-1]]
    return any("attention" in name or "attn" in name for name in names)


def _heads(module: nn.Module) -> int | None:
    """How many heads a module says it has."""
    for name in _HEADS:
        number = getattr(module, name, None)
        if isinstance(number, int) and number > 0:
            return number
    return None


def clean(name: str) -> str:
    """A module's name without the wrappers that compile, FSDP and checkpointing put around."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS[:-1])


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, inside what compiles or distributes it."""
    for name in _WRAPPERS:
        inner = model._modules.get(name)
        if inner is not None and len(model._modules) == 1:
            return unwrapped(inner)
    return model


def frame_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that may hold an attention call: all but torch's own simple ones, and others'."""
    for name, module in model.named_modules():
        torchs = type(module).__module__.startswith("torch.nn.modules")
        simple = not module._modules and (torchs or _is_one_weight(module))
        if not simple and not isinstance(module, torch.jit.ScriptModule):
            yield name, module


def _is_one_weight(module: nn.Module) -> bool:
    """Whether it is a projection or a norm of somebody's own, such as transformers' Conv1D."""
    names = module._parameters.keys()
    return "weight" in names and names <= {"weight", "bias"} and not sounds_like_attention(module)


# ---- the stack


class _Stack(threading.local):
    def __init__(self) -> None:
        self.places: list[Place] = []


_stack = _Stack()
_traced: list[Place | None] = []  # the same while torch.compile looks: it knows lists, not threads


def current() -> Place | None:
    """The innermost place that is running."""
    if torch.compiler.is_compiling():
        return _traced[-1] if _traced else None
    return _stack.places[-1] if _stack.places else None


def enter(module: nn.Module, args: Any) -> None:
    """A forward pre-hook."""
    place = getattr(module, ATTRIBUTE, None)
    if torch.compiler.is_compiling():
        _traced.append(place)
        return
    if place is not None and place.module is module:
        place.ran.clear()
        place.entered += 1
        _stack.places.append(place)


def leave(module: nn.Module, args: Any, output: Any) -> None:
    """A forward hook, called after exceptions, too."""
    if torch.compiler.is_compiling():
        _traced.pop()
        return
    place = getattr(module, ATTRIBUTE, None)
    if place is not None and _stack.places and _stack.places[-1] is place:
        _stack.places.pop()
        place.ran.clear()
        child_ran(module, args, output)


def child_ran(module: nn.Module, args: Any, output: Any) -> None:
    """A forward hook of simple modules: the place around remembers what came out."""
    if torch.compiler.is_compiling() or not _stack.places:
        return
    around = _stack.places[-1]
    name = around.watch.child_names.get(id(module))
    if name is None:
        return
    around.ever_ran.add(name)
    x = output[0] if isinstance(output, tuple) and output else output
    if not isinstance(x, Tensor) or x.dim() < 2 or not around.watch.observing:
        return
    x = x.detach()
    tokens = x.numel() // x.shape[-1] if x.shape[-1] else 0
    ran = Ran(name, module, x, x._version, x.shape[-1], tokens)
    if around.attends:
        ran.square()  # now: what comes may overwrite it
    around.ran.append(ran)
