"""Plan "all-gather": every rank gets all keys and values, and computes its own rows in one kernel call. One collective;
memory for all keys and values while it runs.

Keys are put back in order, so that the kernel processes the same tiles as in one process. They are not kept for the
backward pass, which gathers them again: between the passes, memory is that of the shards. Gradients of keys and values
are summed on the ranks that own them, in rank order, in float32.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from levelhead.distributed import local
from levelhead.distributed.call import Agreement
from levelhead.distributed.local import KeyBlock, OutputGradients, QueryRows
from levelhead.distributed.plan import ForwardResult, PackedKeys, buffers
from levelhead.distributed.split import all_positions
from levelhead.torch.operators import memory, wide


def forward(call: Agreement, own: KeyBlock, *, stats: bool, precise: bool) -> ForwardResult:
    """This rank's rows over all keys."""
    return attend(call, call.rows, _whole(call, own), stats=stats, precise=precise)


def attend(call: Agreement, rows: QueryRows, block: KeyBlock, *, stats: bool, precise: bool) -> ForwardResult:
    """One kernel call over all keys, verified."""
    shape = tuple(rows.q.shape[:-1])
    out = rows.q.new_empty((*shape, block.v.shape[-1]))
    logsumexp = rows.q.new_empty(shape, dtype=wide(rows.q.dtype))
    states = local.unwritten(rows, block, values=stats) if stats or call.verify else None
    into = {"out": memory(out), "logsumexp": memory(logsumexp), "sinks": rows.sink_logits()}
    local.forward(rows, block, states, call.wire.trace, **into)
    if states is not None:
        call.verify_counts(states, rows)
    exact = torch.empty_like(out, dtype=logsumexp.dtype) if precise and out.dtype is not logsumexp.dtype else None
    if exact is not None:  # a second pass: the first has the bits of one process
        into = {"out": memory(exact), "sinks": rows.sink_logits()}
        local.forward(rows.widened(), block.widened(), None, call.wire.trace, **into)
    return ForwardResult(out, logsumexp, states if stats else None, exact=exact)


def backward(call: Agreement, own: KeyBlock, gradients: OutputGradients, wanted: set[str]) -> dict[str, Tensor]:
    """Gradients by name; those of keys and values from every rank's rows."""
    block = _whole(call, own)
    grads = buffers(call.rows, wanted, block, dtype=call.rows.q.dtype)
    local.differentiate(call.rows, block, gradients, grads, call.wire.trace)
    if wanted & {"k", "v"}:
        grads |= _to_owners(call, own.named(wanted), grads)
    return grads


def _whole(call: Agreement, own: KeyBlock) -> KeyBlock:
    """All keys and values, by position."""
    split, packing = call.keys, PackedKeys(own, call.keys)
    mine = torch.empty(packing.most, dtype=own.k.dtype)
    mine[packing.pack(own, mine).numel() :] = 0
    parts = call.wire.gather(mine, "gathering keys and values")
    whole = [x.new_empty((*x.shape[:-2], split.n, x.shape[-1])) for x in (own.k, own.v)]
    for rank, part in enumerate(parts):
        for x, shard in zip(whole, packing.parts(part, split.lengths[rank]), strict=True):
            split.place(x, rank, shard)
    return KeyBlock(whole[0], whole[1], all_positions(split))


def _to_owners(call: Agreement, own: dict[str, Tensor], grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of this rank's keys and values, from the parts of all ranks."""
    split, wire = call.keys, call.wire
    parts = [torch.cat([split.shard(grads[name], rank).reshape(-1) for name in own]) for rank in range(wire.world)]
    sizes = [x.numel() for x in own.values()]
    received = wire.exchange(parts, [sum(sizes)] * wire.world, "summing the gradients of keys and values")
    total = functools.reduce(torch.add, received)
    return {name: x.view(own[name].shape) for name, x in zip(own, torch.split(total, sizes), strict=True)}
