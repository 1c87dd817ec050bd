"""Plan "decode": everybody has the queries, keys and values stay where they are. Each rank attends
to its own keys; the states, small where queries are few, are gathered as one packed tensor and
folded in rank order. Every rank gets the output of all rows, with the same bits.

Every rank is then to compute the same loss from it; that its gradient is the same is checked. So
gradients of keys stay local, and those of the queries are summed over ranks.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

from levelhead import state
from levelhead.distributed import local
from levelhead.distributed.agree import agree_about
from levelhead.distributed.call import Agreement
from levelhead.distributed.local import Block, Result
from levelhead.distributed.plan import Seen, by_row, through_rows, zeros
from levelhead.state import State
from levelhead.torch.operators import wide


def forward(call: Agreement, k: Tensor, v: Tensor, *, stats: bool) -> Seen:
    """All rows over all keys, on every rank."""
    q = call.rows.q.detach().to(torch.float64)
    advice = "In plan decode every rank passes all queries"
    if call.verify:
        agree_about(call.wire, "q", [float(q.sum()), float(q.abs().sum())], advice)
    rows, _ = by_row(call)
    mine = local.observe(rows, Block(k, v, call.keys.runs[call.wire.rank]), call.wire.trace)
    packed = call.wire.gather(_pack(mine), "gathering states")
    states = (_unpack(x, mine, length) for x, length in zip(packed, call.keys.lengths, strict=True))
    whole = functools.reduce(local.join, states)
    if call.verify:  # of the same numbers everywhere: an error here is one on every rank
        trouble = call.check_counts(whole.counts[..., state.COUNT], call.rows)
        if trouble is not None:
            call.complain(trouble)
    return Seen(*local.read(whole, call.rows), whole if stats else None)


def backward(
    call: Agreement, k: Tensor, v: Tensor, result: Result, kept: tuple[Tensor, ...], wanted: set[str]
) -> dict[str, Tensor]:
    """Gradients by name: of keys and values from the rows everybody has, the rest summed."""
    dout = result.dout.to(torch.float64)
    advice = "In plan decode every rank computes the same loss from the same output"
    agree_about(call.wire, "the gradient", [float(dout.sum()), float(dout.abs().sum())], advice)
    rows, factor = by_row(call)
    found = zeros(rows, wanted)
    own = {"k": k, "v": v}
    into = {x: torch.empty(y.shape, dtype=wide(k.dtype)) for x, y in own.items() if x in wanted}
    block = Block(k, v, call.keys.runs[call.wire.rank])
    local.differentiate(rows, block, result, found | into, call.wire.trace)
    # In one order on all ranks. Those of sinks come from the rows alone, which everybody has.
    for name in sorted(found.keys() - {"sinks"}):
        parts = call.wire.gather(found[name], f"summing the gradients of {name}")
        found[name] = functools.reduce(torch.add, parts)
    if "q" in found:
        found["q"] = through_rows(found["q"], factor)
    return found | into


def _pack(x: State) -> Tensor:
    """A state's three arrays as one row of bytes, the widest numbers first."""
    assert x.acc is not None
    parts = [np.ascontiguousarray(part).reshape(-1) for part in (x.counts, x.sums, x.acc)]
    return torch.from_numpy(np.concatenate([part.view(np.uint8) for part in parts]))


def _unpack(packed: Tensor, like: State, keys: int) -> State:
    """The state that another rank packed."""
    assert like.acc is not None
    flat, found, at = packed.numpy(), [], 0
    for part in (like.counts, like.sums, like.acc):
        size = math.prod(part.shape) * part.itemsize
        found.append(flat[at : at + size].view(part.dtype).reshape(part.shape))
        at += size
    counts, sums, acc = found
    return State(sums, counts, acc, keys)
