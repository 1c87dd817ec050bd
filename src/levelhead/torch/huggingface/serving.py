"""Hugging Face models on levelhead: `use(model)` serves their attention until it is undone.

The model keeps its attn_implementation, and with it the masks it makes; what is exchanged is the function that the name
stands for, and only for calls whose module belongs to the model. A module that cannot be served is an error that names
it, and so is an unknown option. transformers is imported when `use` is called, not before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from levelhead.errors import LevelheadValueError, bad_type, bad_value, expected
from levelhead.torch import sdpa
from levelhead.torch.huggingface.by_hand import OwnCalls
from levelhead.torch.huggingface.functions import AttentionHook, has_get_interface, sdpa_function
from levelhead.torch.huggingface.options import attention, weights_are_collected
from levelhead.torch.huggingface.scores import finished
from levelhead.torch.huggingface.survey import (
    Attending,
    attending_modules,
    eager_functions,
    options_read,
    other_formula,
    understood,
)

_MARK = "_levelhead"  # the attribute of a served module
_lock = threading.Lock()


class use:  # noqa: N801  a verb, used as a call and in `with`
    """Runs a model's attention through levelhead, until `.undo()` or the end of the `with`.

    Masks, causality, windows, soft caps, sinks, position biases, grouped heads, scale and dropout are kept; so is
    `attn_implementation`, which must be "sdpa" or "eager". Attention that a module writes out itself is followed and
    served if it is softmax(q kᵀ · scale + bias) v; inside a compiled graph it stays as written. A query that sees no
    key gets what the model gives it: equal weights under "eager", 0 under "sdpa"; 0 also where eager gives NaN. Such a
    query passes gradients on to values alone: a loss over padded tokens gets other gradients than eager's.
    output_attentions=True gives weights of H·T·S numbers per example and layer, before dropout. Other models, and
    copies made of this one, run as before.

    Args:
        model: any `nn.Module` with attention from transformers within.
        partial: serve what can be served and leave the rest in `.left`, instead of raising.

    Attributes:
        served: names of the modules that attend through levelhead.
        left: names of those that do not, and why; empty unless partial.
        calls: how many attention calls were served, those inside compiled graphs not counted.

    Example:
        >>> import torch, transformers
        >>> import levelhead.torch as lt
        >>> tiny = dict(vocab_size=16, hidden_size=8, num_attention_heads=2, intermediate_size=8)
        >>> config = transformers.LlamaConfig(num_hidden_layers=3, num_key_value_heads=1, **tiny)
        >>> model = transformers.LlamaModel(config).eval()
        >>> tokens = torch.tensor([[1, 2, 3, 4]])
        >>> with torch.no_grad(), lt.huggingface.use(model) as used:
        ...     out = model(tokens).last_hidden_state
        >>> used
        use(LlamaModel): 3 modules served, 3 calls, undone
        >>> with torch.no_grad():
        ...     torch.allclose(out, model(tokens).last_hidden_state, atol=1e-5)
        True
    """

    def __init__(self, model: nn.Module, *, partial: bool = False) -> None:
        if not isinstance(model, nn.Module):
            advice = "Give the model itself, not its name or its outputs"
            raise bad_type("model", "a torch.nn.Module", type(model).__name__, advice)
        served, left = _divide(model)
        if not served or (left and not partial):
            raise LevelheadValueError(_refusal(model, len(served), left))
        self.served = tuple(attending.name for attending in served)
        self.left = left
        self.calls = 0
        self.partial = partial
        self._kind = type(model).__name__
        with _lock:
            _hook.install()
            self._modules = list(model.modules())
            for module in self._modules:
                _marks(module).uses.append(self)
            for attending in served:
                functions: list[Any] = [f for f in eager_functions(attending.module) if understood(f)]
                _marks(attending.module).read |= {f: options_read(f) for f in [sdpa_function(), *functions]}
                own = attending.sdpa or attending.by_hand or not attending.asks
                _watch(attending.module, own=own)

    def undo(self) -> None:
        """Puts everything back as it was."""
        with _lock:
            for module in self._modules:
                marks = _marks(module)
                marks.uses.remove(self)
                if not marks.uses:
                    _unmark(module)
            if self._modules:
                _hook.remove()
            self._modules = []

    def __enter__(self) -> use:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        missing = f", {len(self.left)} left" if self.left else ""
        state = "" if self._modules else ", undone"
        return f"use({self._kind}): {len(self.served)} modules served{missing}, {self.calls} calls{state}"


# ---- which modules


def _divide(model: nn.Module) -> tuple[list[Attending], dict[str, str]]:
    """The modules that can be served, and why the others cannot."""
    served, left = [], {}
    for attending in attending_modules(model):
        reason = _why_not(attending)
        if reason is None:
            served.append(attending)
        else:
            left[attending.name] = f"{type(attending.module).__name__} {reason}"
    return served, left


def _why_not(attending: Attending) -> str | None:
    name = getattr(getattr(attending.module, "config", None), "_attn_implementation", None)
    if attending.interface:
        if name not in ("sdpa", "eager", None):
            return f"runs {name!r}: load it with attn_implementation 'sdpa' or 'eager'"
        if name == "sdpa":
            return None
        if not has_get_interface():
            return "runs 'eager' where this transformers does not ask: load it with 'sdpa'"
    return other_formula(attending.module)


def _refusal(model: nn.Module, served: int, left: dict[str, str]) -> str:
    if not left:
        advice = "Is it a transformers model, with its weights on this side of any wrapper"
        return expected("model", "modules that attend", f"none in {type(model).__name__}", advice)
    shown = [f"{name}: {why}" for name, why in list(left.items())[:8]]
    more = [f"and {len(left) - 8} more"] if len(left) > 8 else []
    given = f"{len(left)} of {served + len(left)} that do not:\n  " + "\n  ".join(shown + more)
    advice = "use(model, partial=True) serves the others" if served else "Nothing is left to serve"
    return expected("model", "attention modules that let themselves be served", given + "\n", advice)


# ---- marks: whose calls are served


class _Marks:
    """What a served module carries; a copy of the module carries an empty one."""

    def __init__(self) -> None:
        self.uses: list[use] = []
        self.read: dict[Callable[..., Any], frozenset[str]] = {}  # functions that are understood, with their options
        self.own = False  # may attend without asking the interface, depending on the call
        self.forward: Any = None  # an instance's own forward, which watching replaced

    def __reduce__(self) -> Any:
        return _Marks, ()


def _marks(module: nn.Module) -> _Marks:
    marks: _Marks = module.__dict__.setdefault(_MARK, _Marks())
    return marks


def is_served(module: nn.Module) -> bool:
    """Whether levelhead computes the attention of this module now."""
    marks = getattr(module, _MARK, None)
    return isinstance(marks, _Marks) and bool(marks.uses)


def _unmark(module: nn.Module) -> None:
    marks = module.__dict__.pop(_MARK)
    if _is_watched(module):
        del module.__dict__["forward"]
        if marks.forward is not None:
            module.__dict__["forward"] = marks.forward


def _watch(module: nn.Module, *, own: bool) -> None:
    # Every served module, also if it needs no watching: its changed forward makes graphs compile again.
    _marks(module).own |= own
    if not _is_watched(module):
        _marks(module).forward = module.__dict__.get("forward")
        module.__dict__["forward"] = MethodType(_watched_forward, module)


def _is_watched(module: nn.Module) -> bool:
    return getattr(module.__dict__.get("forward"), "__func__", None) is _watched_forward


def _watched_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A forward that may call torch's function, which is exchanged; it is an error if it attends by hand."""
    marks = _marks(module)
    forward = marks.forward or partial(type(module).forward, module)
    if not marks.uses or not marks.own:  # a copy; or all its calls go through the interface
        return forward(*args, **kwargs)
    return _within(marks, module, partial(forward, *args, **kwargs), bool(kwargs.get("output_attentions")))


def _within(marks: _Marks, module: nn.Module, run: Callable[[], Any], weights: bool) -> Any:
    """What run() gives, with the attention that its code calls or writes out served."""
    before = marks.uses[0].calls
    with OwnCalls(partial(_count, marks)) as mode:
        out = run()
    if torch.compiler.is_compiling():
        return out
    unseen = mode.normalises and marks.uses[0].calls == before and not all(one.partial for one in marks.uses)
    if unseen and not sdpa.patch.active:
        given = f"{type(module).__name__} computing this call by another formula"
        advice = "use(model, partial=True) lets it, or undo() first"
        raise bad_value("model", "attention that is softmax(q kᵀ · scale + bias) v", given, advice)
    return finished(out, weights=weights or weights_are_collected(module))


def _count(marks: _Marks) -> None:
    if not torch.compiler.is_compiling():  # a number that changes would be compiled again and again
        for one in marks.uses:
            one.calls += 1


# ---- whose call it is


def _called(original: Any, name: str, module: nn.Module, /, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    """Levelhead's attention if the module is marked, else the original function."""
    marks: _Marks | None = getattr(module, _MARK, None)
    if marks is None or not marks.uses:
        result: tuple[Tensor, Any] = original(module, *args, **kwargs)
        return result
    eager = name == "eager"
    if eager and original not in marks.read and not torch.compiler.is_compiling():
        if not understood(original):  # its operations are followed
            wanted = bool(kwargs.get("output_attentions"))
            return cast(tuple[Tensor, Any], _within(marks, module, partial(original, module, *args, **kwargs), wanted))
        marks.read[original] = options_read(original)
    read = marks.read.get(original)
    if read is None or eager == _is_sdpa(original):
        given = f"{getattr(original, '__name__', original)} in {type(module).__name__}"
        wanted_function = "the attention of attn_implementation 'sdpa' or 'eager'"
        raise bad_value("model", wanted_function, given, "undo() first, or set it back")
    out = attention(eager, read, module, *args, **kwargs)
    _count(marks)
    return out


def _is_sdpa(function: Any) -> bool:
    return getattr(function, "__module__", "") == "transformers.integrations.sdpa_attention"


_hook = AttentionHook(_called, replaces=True)
