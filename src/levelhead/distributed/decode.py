"""Plan "decode": every rank has all queries; keys and values stay where they are.

Each rank attends to its own keys. The states, small where queries are few, are gathered as one packed tensor and joined
in rank order. Every rank gets the output of all rows, with the same bits.

Every rank must then compute the same loss from it; that its gradient is the same is checked. So gradients of keys stay
local, and those of the queries are summed over ranks.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

from levelhead.distributed import local
from levelhead.distributed.agree import agree_about
from levelhead.distributed.call import Agreement
from levelhead.distributed.local import KeyBlock, OutputGradients
from levelhead.distributed.plan import ForwardResult, buffers, by_row, read, through_rows
from levelhead.state import State


def forward(call: Agreement, own: KeyBlock, *, stats: bool, precise: bool) -> ForwardResult:
    """All rows over all keys, on every rank."""
    if call.verify:
        agree_about(call.wire, "q", call.rows.q.detach(), "In plan decode every rank passes all queries")
    rows, _ = by_row(call)
    rows, own = (rows.widened(), own.widened()) if precise else (rows, own)
    own_state = local.observe(rows, own, call.wire.trace)
    packed = call.wire.gather(_pack(own_state), "gathering states")
    states = (_unpack(x, own_state, length) for x, length in zip(packed, call.keys.lengths, strict=True))
    whole = functools.reduce(local.join, states)
    call.verify_counts(whole, call.rows)
    return read(call, whole, stats=stats, precise=precise)


def backward(call: Agreement, own: KeyBlock, gradients: OutputGradients, wanted: set[str]) -> dict[str, Tensor]:
    """Gradients by name: local for keys and values, summed over ranks for the rest."""
    advice = "In plan decode every rank computes the same loss from the same output"
    agree_about(call.wire, "the gradient", gradients.dout, advice)
    rows, factor = by_row(call)
    grads = buffers(rows, wanted, own)
    local.differentiate(rows, own, gradients, grads, call.wire.trace)
    # In the same order on all ranks. Those of sinks follow from the rows alone, which every rank has.
    for name in sorted(grads.keys() - {"k", "v", "sinks"}):
        parts = call.wire.gather(grads[name], f"summing the gradients of {name}")
        grads[name] = functools.reduce(torch.add, parts)
    if "q" in grads:
        grads["q"] = through_rows(grads["q"], factor)
    return grads


def _pack(x: State) -> Tensor:
    """A state's three arrays as one row of bytes, the widest numbers first."""
    assert x.acc is not None
    parts = [np.ascontiguousarray(part).reshape(-1) for part in (x.counts, x.sums, x.acc)]
    return torch.from_numpy(np.concatenate([part.view(np.uint8) for part in parts]))


def _unpack(packed: Tensor, like: State, keys: int) -> State:
    """The state that another rank packed."""
    assert like.acc is not None
    flat, arrays, at = packed.numpy(), [], 0
    for part in (like.counts, like.sums, like.acc):
        size = math.prod(part.shape) * part.itemsize
        arrays.append(flat[at : at + size].view(part.dtype).reshape(part.shape))
        at += size
    counts, sums, acc = arrays
    return State(sums, counts, acc, keys)
