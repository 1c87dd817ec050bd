"""Watching inside compiled graphs: two operators that the compiler keeps as they are.

They change a handle, and nothing else, so that the compiler does not remove them; their work happens in Python when the
graph runs. A watched module is found by its number, so a graph that outlives its watch does no harm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_fake

from levelhead.watching.measure import Call
from levelhead.watching.module_stack import WATCHED_MODULES, Frame, WatchedModule

_library: Any = Library("levelhead_watch", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "call(Tensor(a!) handle, Tensor q, Tensor k, Tensor? scale, float factor, Tensor? mask,"
    " bool causal, SymInt start, SymInt? left, SymInt? right, float? softcap, Tensor? sinks,"
    " bool ready, str how) -> ()",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define("forward(Tensor(a!) handle) -> ()", tags=torch.Tag.pt2_compliant_tag)


def trace(watched: WatchedModule, call: Call, how: str) -> None:
    """Inserts an operator into the graph that measures a call."""
    scale = call.scale if isinstance(call.scale, Tensor) else None
    torch.ops.levelhead_watch.call(
        watched.handle,
        call.q.detach(),
        call.k.detach(),
        scale,
        1.0 if scale is not None else call.scale,
        None if call.mask is None else call.mask.detach(),
        call.causal,
        call.start,
        call.left,
        call.right,
        call.softcap,
        None if call.sinks is None else call.sinks.detach(),
        call.ready,
        how,
    )


def trace_forward(watched: WatchedModule) -> None:
    """Inserts an operator into the graph that counts a forward pass of the whole model."""
    torch.ops.levelhead_watch.forward(watched.handle)


def _call(
    handle: Tensor,
    q: Tensor,
    k: Tensor,
    scale: Tensor | None,
    factor: float,
    mask: Tensor | None,
    causal: bool,
    start: int,
    left: int | None,
    right: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    ready: bool,
    how: str,
) -> None:
    watched = WATCHED_MODULES.get(int(handle[0]))
    if watched is not None:
        watched.runs += 1
    if watched is not None and watched.watch.wanted():
        factor_or_scale = factor if scale is None else scale
        call = Call(q, k, factor_or_scale, mask, causal, start, left, right, softcap, sinks, ready)
        watched.watch.record_call(Frame(watched), how, call)
    handle[1] += 1


def _forward(handle: Tensor) -> None:
    watched = WATCHED_MODULES.get(int(handle[0]))
    if watched is not None:
        watched.watch.compiled = True
        watched.watch.begin_forward()
    handle[1] += 1


def _nothing(*args: Any) -> None:
    return None


_library.impl("call", _call, "CompositeExplicitAutograd")
_library.impl("forward", _forward, "CompositeExplicitAutograd")
register_fake("levelhead_watch::call", _nothing, lib=_library)
register_fake("levelhead_watch::forward", _nothing, lib=_library)
