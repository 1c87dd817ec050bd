"""Running an intercepted attention call: as it is, with the same result, and measured.

All wrappers end here. A call that levelhead computes brings the statistics of that very pass; any other call is
described as a `Call` and measured after it ran. While `torch.compile` traces, an operator in the graph does the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.torch.operators import observing
from levelhead.watching import compiled
from levelhead.watching.measure import Call, plain
from levelhead.watching.module_stack import Frame
from levelhead.watching.undisturbed import undisturbed

Run = Callable[[], Any]
UNREADABLE = "whose numbers cannot be read"
_UNREADABLE = f"ran on {{}}, {UNREADABLE}"
_IN_FUNCTION = "tensors inside a transformation of torch.func"
TRANSFORMED = _UNREADABLE.format(_IN_FUNCTION)


def run_observed(frame: Frame, path: str, run: Run, describe: Callable[[], Call], *, as_described: bool = False) -> Any:
    """Runs a call, and has the watch measure it; `as_described`: by its description, also if levelhead computes it."""
    if frame.busy or not frame.watch.wanted():
        return run()
    frame.busy = True
    try:
        with observing() as passes:
            result = run()
        with undisturbed():
            if len(passes) == 1 and not as_described:
                frame.watch.record_pass(frame, path, passes[0])
            else:
                frame.watch.record_call(frame, path, describe())
    finally:
        frame.busy = False
    return result


def run_traced(frame: Frame, path: str, run: Run, call: Call) -> Any:
    """The same while `torch.compile` traces: the graph gets an operator that measures the call."""
    compiled.trace(frame, call, path)
    frame.busy = True
    result = run()
    frame.busy = False
    return result


def run_labelled(frame: Frame, path: str, run: Run) -> Any:
    """Runs a function whose attention call is intercepted inside it, under `path`, or computed by levelhead."""
    frame.via = path
    if torch.compiler.is_compiling():
        result = run()
        frame.via = ""
        return result
    try:
        with observing() as passes:
            result = run()
    finally:
        frame.via = ""
    if passes and frame.watch.wanted():
        with undisturbed():
            frame.watch.record_pass(frame, f"{path}, levelhead", passes[0])
    return result


def is_retraced(x: Any) -> bool:
    """Whether a part of a graph runs on tensors without numbers, after it was traced."""
    return torch.compiler.is_compiling() and type(x) not in (Tensor, nn.Parameter)


def cannot_be_read(frame: Frame, *tensors: Any) -> bool:
    """Whether a call's numbers cannot be read; the coverage report then gives the reason."""
    with undisturbed():
        unreadable = next((x for x in tensors if isinstance(x, Tensor) and not plain(x)), None)
        if unreadable is None:
            return False
        if frame.watch.wanted():
            frame.watched.not_observed[_UNREADABLE.format(_kind(unreadable))] = None
        return True


def _kind(x: Tensor) -> str:
    if x.is_nested:
        return "nested tensors"
    if x.layout is not torch.strided:
        return "sparse tensors"
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return _IN_FUNCTION
    return "meta tensors" if x.is_meta else f"tensors of type {type(x).__name__}"
