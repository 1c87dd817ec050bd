"""Plan "all-gather": every rank gets all keys and values, and computes its own rows in one kernel call. One collective;
memory for all keys and values while it runs.

Keys are put back in order, so that the kernel processes the same tiles as in one process. They are not kept for the
backward pass, which gathers them again: between the passes, memory is that of the shards. Gradients of keys and values
are summed on the ranks that own them, in rank order, in float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from levelhead import _core, state
from levelhead.distributed import local
from levelhead.distributed.call import Agreement
from levelhead.distributed.local import KeyBlock, OutputGradients, QueryRows
from levelhead.distributed.plan import ForwardResult, PackedKeys, zeros
from levelhead.distributed.split import all_positions
from levelhead.distributed.trace import timed
from levelhead.state import State
from levelhead.torch.operators import memory, wide


def forward(call: Agreement, k: Tensor, v: Tensor, *, stats: bool) -> ForwardResult:
    """This rank's rows over all keys."""
    result, states = attend(call, call.rows, _whole(call, k, v), stats=stats)
    if call.verify:
        assert states is not None
        call.confirm(call.check_counts(states.counts[..., state.COUNT], call.rows))
    return result


def attend(call: Agreement, rows: QueryRows, block: KeyBlock, *, stats: bool) -> tuple[ForwardResult, State | None]:
    """One kernel call over all keys, and the states where they are returned or verified."""
    shape = tuple(rows.q.shape[:-1])
    out = rows.q.new_empty((*shape, block.v.shape[-1]))
    logsumexp = rows.q.new_empty(shape, dtype=wide(rows.q.dtype))
    into: dict[str, Any] = {"out": memory(out), "logsumexp": memory(logsumexp)}
    states: State | None = None
    if stats:
        states = local.unwritten(rows, block)
        assert states.acc is not None
        into |= {"sums": states.sums, "counts": states.counts, "acc": states.acc}
    elif call.verify:
        real = memory(logsumexp).dtype
        sums = np.empty((*shape, len(state.SUMS)), real)
        states = State(sums, np.empty((*shape, len(state.COUNTS)), np.int64), None, block.k.shape[-2])
        into |= {"sums": states.sums, "counts": states.counts}
    with timed(call.wire.trace, "compute", "forward"):
        _core.forward(
            memory(rows.q),
            memory(block.k),
            memory(block.v),
            sinks=rows.sink_logits(),
            **into,
            **rows.keywords(block.runs, rows.columns(block.runs)),
        )
    return ForwardResult(out, logsumexp, states if stats else None), states


def backward(
    call: Agreement, k: Tensor, v: Tensor, gradients: OutputGradients, kept: tuple[Tensor, ...], wanted: set[str]
) -> dict[str, Tensor]:
    """Gradients by name; those of keys and values from every rank's rows."""
    block = _whole(call, k, v)
    grads = zeros(call.rows, wanted, call.rows.q.dtype)
    shared = {"k": block.k, "v": block.v}
    grads |= {name: torch.empty(x.shape, dtype=wide(k.dtype)) for name, x in shared.items() if name in wanted}
    local.differentiate(call.rows, block, gradients, grads, call.wire.trace)
    if wanted & {"k", "v"}:
        grads |= _to_owners(call, k, v, grads, wanted)
    return grads


def _whole(call: Agreement, k: Tensor, v: Tensor) -> KeyBlock:
    """All keys and values, by position."""
    split = call.keys
    packing = PackedKeys(k, v, split)
    mine = torch.empty(packing.most, dtype=k.dtype)
    mine[packing.pack(k, v, mine).numel() :] = 0
    parts = call.wire.gather(mine, "gathering keys and values")
    whole = [x.new_empty((*x.shape[:-2], split.n, x.shape[-1])) for x in (k, v)]
    for rank, part in enumerate(parts):
        for x, shard in zip(whole, packing.parts(part, split.lengths[rank]), strict=True):
            split.place(x, rank, shard)
    return KeyBlock(whole[0], whole[1], all_positions(split))


def _to_owners(call: Agreement, k: Tensor, v: Tensor, grads: dict[str, Tensor], wanted: set[str]) -> dict[str, Tensor]:
    """The gradients of this rank's keys and values, from the parts of all ranks."""
    split, wire = call.keys, call.wire
    own = {name: x for name, x in (("k", k), ("v", v)) if name in wanted}
    parts = [torch.cat([split.shard(grads[name], rank).reshape(-1) for name in own]) for rank in range(wire.world)]
    sizes = [x.numel() for x in own.values()]
    received = wire.exchange(parts, [sum(sizes)] * wire.world, "summing the gradients of keys and values")
    total = received[0].clone()
    for part in received[1:]:
        total += part
    return {name: x.view(own[name].shape) for name, x in zip(own, torch.split(total, sizes), strict=True)}
