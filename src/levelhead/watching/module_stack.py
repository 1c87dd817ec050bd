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

from levelhead.watching.effective_scale import Ran, ran
from levelhead.watching.measure import plain
from levelhead.watching.transformers_calls import forms_softmax_by_hand, understands

ATTRIBUTE = "_levelhead_place"
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module")
_DISTRIBUTORS = ("torch.", "deepspeed.", "accelerate.")  # who calls the model inside "module"
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
        self.heads = _heads(module)
        self.understood = understands(module)
        self.legacy = self.heads is not None and forms_softmax_by_hand(module)
        # None: not known yet, so what runs in it is looked at as if it did.
        self.attends = True if sounds_like_attention(module) else None
        self.calls = 0
        self.entered = 0
        self.slowed = False  # its native fast path would have run
        self.ways: dict[str, None] = {}  # through what it was seen, in order
        self.unseen: dict[str, None] = {}  # why calls of it were not
        self.ever_ran: set[str] = set()  # names of children

    def __deepcopy__(self, memo: Any) -> None:
        return None  # a copy of a watched model is not watched

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class Frame:
    """A place that is running, in one thread; of a compiled one, the time while it is traced."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.ran: list[Ran] = []  # inside it, since it was entered
        self.busy = False  # inside a call that is being observed already
        self.open = False  # inside a function whose softmax is to be looked at
        self.via = ""  # inside a function of that name
        self.kv_heads = 0  # that the function was given, before it repeated them; 0: not known


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
        known = name != "module" or type(model).__module__.startswith(_DISTRIBUTORS)
        if inner is not None and known and len(model._modules) == 1:
            return unwrapped(inner)
    return model


def frame_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The model, and modules in it that may hold an attention call: all but simple ones."""
    for name, module in model.named_modules():
        torchs = type(module).__module__.startswith("torch.nn.modules")
        simple = not module._modules and (torchs or _is_one_weight(module))
        if not (simple and name) and not isinstance(module, torch.jit.ScriptModule):
            yield name, module


def _is_one_weight(module: nn.Module) -> bool:
    """Whether it is a projection or a norm of somebody's own, such as transformers' Conv1D."""
    names = module._parameters.keys()
    return "weight" in names and names <= {"weight", "bias"} and not sounds_like_attention(module)


# ---- the stack


class _Stack(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []


_stack = _Stack()
traced: list[Frame | None] = []  # the same while torch.compile looks: it knows lists, not threads


def current() -> Frame | None:
    """The innermost place that is running."""
    if torch.compiler.is_compiling():
        return traced[-1] if traced else None
    return _stack.frames[-1] if _stack.frames else None


def enter(module: nn.Module, args: Any) -> None:
    """A forward pre-hook."""
    place = getattr(module, ATTRIBUTE, None)
    if torch.compiler.is_compiling():
        traced.append(None if place is None else Frame(place))
        return
    if place is None or place.module is not module:
        return
    if module is place.watch.model:
        leave_all(place.watch)  # a run that Ctrl-C ended has left its frames: no hook ran then
    place.entered += 1
    if isinstance(module, nn.MultiheadAttention) and _would_be_fast(module):
        place.slowed = True
    _stack.frames.append(Frame(place))


def leave(module: nn.Module, args: Any, output: Any) -> None:
    """A forward hook, called after exceptions, too."""
    if torch.compiler.is_compiling():
        traced.pop()
        return
    place = getattr(module, ATTRIBUTE, None)
    if place is None or not _stack.frames or _stack.frames[-1].place is not place:
        return
    _stack.frames.pop()
    if place.attends is None and output is not None and place.watch.wanted():
        place.attends = False  # ran whole, and called nothing
    child_ran(module, args, output)


def leave_all(watch: Any) -> None:
    """Forgets what this thread has running of a watched model."""
    _stack.frames[:] = [frame for frame in _stack.frames if frame.place.watch is not watch]


def _would_be_fast(module: nn.MultiheadAttention) -> bool:
    if module.training:
        return False
    return not (torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()))


def child_ran(module: nn.Module, args: Any, output: Any) -> None:
    """A forward hook of simple modules: the place around remembers what came out."""
    if torch.compiler.is_compiling() or not _stack.frames:
        return
    frame = _stack.frames[-1]
    around = frame.place
    name = around.watch.child_names.get(id(module))
    if name is None:
        return
    around.ever_ran.add(name)
    if around.attends is False or not around.watch.wanted():
        return
    x = output[0] if isinstance(output, tuple) and output else output
    if isinstance(x, Tensor) and x.dim() > 1 and x.is_floating_point() and plain(x):
        busy, frame.busy = frame.busy, True  # squaring is nobody's attention
        frame.ran.append(ran(name, module, x))
        frame.busy = busy
