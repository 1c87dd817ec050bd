"""Wrappers over the functions of the table (`functions`), and over those that users taught.

A wrapper runs the function as it is. If the table describes the call, it is measured; if not, the report names the
function and the option, unless a call that is known runs inside it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from levelhead.torch.swap import Function
from levelhead.watching.functions import taught
from levelhead.watching.functions.known import Known, arguments, parameter_names
from levelhead.watching.measure import Call
from levelhead.watching.module_stack import WATCHED_MODULES, Frame, GradientInputs, current
from levelhead.watching.observe_call import cannot_be_read, is_retraced, run_observed, run_traced


def known_over(original: Function, known: Known, key: Any = None) -> Function:
    """A function of the table, observed; `key`: the class of which it is the `forward`."""
    names = parameter_names(original)
    key = original if key is None else key

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        frame = current()
        if frame is None or frame.busy:
            return original(*args, **kwargs)
        if key in frame.watch.describers:
            return run_taught(frame, key, functools.partial(original, *args, **kwargs), args, kwargs)
        given = arguments(names, args, kwargs)
        path = f"{frame.via}, {known.path}" if frame.via else known.path
        return _run(frame, known, given, path, original, args, kwargs)

    return call


def _run(
    frame: Frame, known: Known, given: dict[str, Any], path: str, original: Function, args: Any, kwargs: Any
) -> Any:
    compiling = torch.compiler.is_compiling()
    followed = known.followed(given)
    tensors = tuple(x for _, x, _ in followed)
    if not isinstance(tensors[0], Tensor) or is_retraced(tensors[0]):
        return original(*args, **kwargs)
    refused = known.refuses(given)
    if refused is not None:
        reason = not_described(known.path, f" with {refused}")
        return run_unless_inside(frame, lambda: original(*args, **kwargs), reason)
    if compiling:
        return run_traced(frame, path, lambda: original(*args, **kwargs), known.describe(given))
    if cannot_be_read(frame, *tensors):
        return original(*args, **kwargs)
    v = tensors[2] if len(tensors) > 2 else None
    views = tuple(view for _, _, view in followed)
    frame.watch.follow_gradients(frame, GradientInputs(tensors[0], tensors[1], v, views=views))
    return run_observed(frame, path, lambda: original(*args, **kwargs), lambda: known.describe(given))


def taught_over(original: Function, key: Any = None) -> Function:
    """A function that some watch was taught; `key`: the class of which it is the `forward`."""
    key = original if key is None else key

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        frame = current()
        if frame is None or frame.busy or key not in frame.watch.describers:
            return original(*args, **kwargs)
        return run_taught(frame, key, functools.partial(original, *args, **kwargs), args, kwargs)

    return call


def run_taught(frame: Frame, original: Any, run: Callable[[], Any], args: Any, kwargs: Any) -> Any:
    """Runs a function that the watch of this frame was taught."""
    name, describer = taught.name_of(original), frame.watch.describers[original]
    path = f"{frame.via}, {name}" if frame.via else name
    if torch.compiler.is_compiling():
        frame.busy = True
        result = run()
        frame.busy = False
        note(frame, f"{name} is not described inside a compiled graph")
        return result
    if cannot_be_read(frame, *(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))):
        return run()

    def describe() -> Call:
        return taught.call_from(original, describer, args, kwargs)

    return run_observed(frame, path, run, describe)


# ---- what is not described


def not_described(name: str, more: str = "") -> str:
    """The reason that the report gives."""
    return f"{name}{more} is not described: teach it with lh.watch(model, describe={{function: describer}})"


def run_unless_inside(frame: Frame, run: Callable[[], Any], reason: str) -> Any:
    """Runs a function that is not described. If a known call inside it is observed, nothing was missed."""
    if torch.compiler.is_compiling():
        result = run()
        note(frame, reason)
        return result
    before = frame.watched.calls
    result = run()
    if frame.watched.calls == before and frame.watch.wanted():
        note(frame, reason)
    return result


def note(frame: Frame, reason: str) -> None:
    """Writes a reason why calls of this module were not observed; while Dynamo traces, too."""
    _written(frame.watched.number, reason)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _written(number: int, reason: str) -> bool:
    WATCHED_MODULES[number].not_observed[reason] = None
    return True
