"""A function of transformers' attention interface, observed and amended.

There are three kinds. Some call another function that is intercepted itself, which then observes the call. Others are
described by their arguments. What remains does more than its arguments say: there the softmax inside is observed.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.torch.huggingface.options import attention as levelhead_attention
from levelhead.torch.huggingface.serving import is_served
from levelhead.torch.huggingface.survey import options_read
from levelhead.torch.swap import Function
from levelhead.watching import amend
from levelhead.watching.functions import taught
from levelhead.watching.functions import transformers as calls
from levelhead.watching.intercept_known import not_described, run_taught, run_unless_inside
from levelhead.watching.module_stack import Frame, GradientInputs, current
from levelhead.watching.observe_call import Run, cannot_be_read, is_retraced, run_labelled, run_observed, run_traced

_NONE: frozenset[str] = frozenset()  # made here: a graph cannot make one


def transformers_attention(
    function: Function, name: str, module: nn.Module, query: Tensor, key: Tensor, *args: Any, **options: Any
) -> Any:
    """Runs instead of function(module, query, key, ...); `name` is that of the implementation."""
    amendment = amend.of(module)
    by_levelhead = amendment is not None and amend.is_ours(name, query)
    if amendment is not None:
        options = amendment.for_interface(name, module, query, options)

    def run() -> Any:
        if by_levelhead:
            read = _NONE if torch.compiler.is_compiling() else options_read(function)
            return levelhead_attention(name == "eager", read, module, query, key, *args, **options)
        return function(module, query, key, *args, **options)

    frame = current()
    if frame is None or frame.busy or is_retraced(query):
        return run()
    compiling = torch.compiler.is_compiling()
    if not compiling and cannot_be_read(frame, query, key):
        return run()
    path = f"huggingface:{name}"
    frame.kv_heads = key.shape[1]

    taught_one = calls.innermost(function)
    if taught_one in frame.watch.describers:
        return run_taught(frame, taught_one, run, (module, query, key, *args), options)
    kind = calls.origin(name, function)
    calls_intercepted = not compiling if by_levelhead else kind == "sdpa"
    if calls_intercepted:
        return run_labelled(frame, path, run)
    if kind == "other" and not by_levelhead:
        reason = not_described(f"{taught.name_of(taught_one)} ({path})")
        return run_unless_inside(frame, lambda: run_labelled(frame, path, run), reason)

    if not compiling:
        value = args[0] if args else options.get("value")
        frame.watch.follow_gradients(frame, GradientInputs(query, key, value))
    served = isinstance(function, functools.partial) and is_served(module)  # levelhead computes it
    undescribed = by_levelhead and amend.has_no_description(options)
    if served and compiling and name == "eager" and not undescribed:
        # levelhead's operator gets other rows where every key is hidden; its front end knows all options it takes.
        return run_traced(frame, f"{path}, levelhead", run, calls.describe(kind, module, query, key, *args, **options))
    if undescribed or (name == "eager" and (served or not _is_understood(frame, taught_one))):
        return _run_with_softmax(frame, path, run, observed=not served)

    mask = args[1] if len(args) > 1 else options.get("attention_mask")
    refused = calls.refuses(kind, query, key, mask, options)
    if refused is not None:
        reason = not_described(path, f" with {refused}")
        return run_unless_inside(frame, lambda: run_labelled(frame, path, run), reason)
    if compiling:
        return run_traced(frame, path, run, calls.describe(kind, module, query, key, *args, **options))
    return run_observed(frame, path, run, lambda: calls.describe(kind, module, query, key, *args, **options))


def _is_understood(frame: Frame, function: Function) -> bool:
    """Whether an eager function is softmax(q kᵀ · scale + mask) v. Dynamo cannot trace reading its code."""
    if torch.compiler.is_compiling():
        return frame.watched.eager_is_understood
    return calls.is_understood(function)


def _run_with_softmax(frame: Frame, path: str, run: Run, *, observed: bool) -> Any:
    """Runs a function whose softmax is the call, if `observed`."""
    frame.softmax_is_call = observed
    result = run_labelled(frame, path, run)  # after an exception the frame is discarded
    frame.softmax_is_call = False
    return result
