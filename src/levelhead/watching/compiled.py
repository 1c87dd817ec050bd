"""Watching inside compiled graphs: two operators that the compiler keeps as they are.

They change a handle, and nothing else, so that the compiler does not remove them; their work happens in Python when the
graph runs. A call gets samples of what the layers before it put out, too (`sampled`). A watched module is found by its
number, so a graph that outlives its watch does no harm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.library import Library, register_fake

from levelhead.call.options import Scoring
from levelhead.torch.operators import SCHEMA
from levelhead.watching import folded_heads, graph_sites
from levelhead.watching.effective_scale import Ran
from levelhead.watching.measure import Call
from levelhead.watching.module_stack import (
    INPUT,
    WATCHED_MODULES,
    Frame,
    WatchedModule,
    traced,
    traced_before,
    would_be_fast,
)

NO_GRADIENTS = "gradients are not read inside compiled graphs"

_library: Any = Library("levelhead_watch", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    f"call(Tensor(a!) handle, Tensor q, Tensor k, {SCHEMA}, bool ready, str how, "
    "Tensor[] rows, SymInt[] tokens, SymInt[] reads, int site, SymInt kv_heads) -> ()",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define("forward(Tensor(a!) handle) -> ()", tags=torch.Tag.pt2_compliant_tag)


def trace(frame: Frame, call: Call, path: str) -> None:
    """Inserts an observer op for a call into the graph."""
    watched = frame.watched
    fields = (x.detach() if isinstance(x, Tensor) else x for x in call.scoring)
    ran = traced_before(watched.watch)
    rows, tokens, reads = [one.rows for one in ran], [one.tokens for one in ran], [one.reads for one in ran]
    options = (call.ready, path, rows, tokens, reads, graph_sites.number(len(traced)), frame.kv_heads)
    torch.ops.levelhead_watch.call(watched.handle, call.q.detach(), call.k.detach(), *fields, *options)
    frame.kv_heads = 0


def trace_forward(watched: WatchedModule) -> None:
    """Inserts an observer op for a forward pass of the whole model into the graph."""
    torch.ops.levelhead_watch.forward(watched.handle)


def _call(handle: Tensor, q: Tensor, k: Tensor, *arguments: Any) -> None:
    *fields, ready, path, rows, tokens, reads, site, kv_heads = arguments
    watched = WATCHED_MODULES.get(int(handle[0]))
    if watched is not None:
        watched.runs += 1
        watched.lost_fast_path |= isinstance(watched.module, nn.MultiheadAttention) and would_be_fast(watched.module)
    if watched is not None and watched.watch.wanted():
        frame = Frame(watched)
        frame.place, frame.sites, frame.kv_heads = graph_sites.place(site), watched.graph_sites, kv_heads
        for width, count, sample in zip(reads, tokens, rows, strict=True):
            of_input = width == INPUT
            (frame.inputs if of_input else frame.ran).append(Ran("", None, None if of_input else width, count, sample))
        if watched.watch.gradients:
            watched.not_observed[NO_GRADIENTS] = None
        call = Call(q, k, Scoring(*fields), ready)
        other = q.dim() != 4 or (path == "sdpa" and folded_heads.is_other(frame, q, k, k))
        watched.watch.record_call(frame, path, folded_heads.found(frame, call).call if other else call)
    handle[1] += 1


def _forward(handle: Tensor) -> None:
    watched = WATCHED_MODULES.get(int(handle[0]))
    if watched is not None:
        watched.watch.compiled = True
        watched.watch.begin_forward()
    handle[1] += 1


for _name, _implementation in (("call", _call), ("forward", _forward)):
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    register_fake(f"levelhead_watch::{_name}", lambda *args: None, lib=_library)
