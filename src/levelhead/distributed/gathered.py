"""Plan "all-gather": every rank gets all keys and values, and computes its own rows in one kernel
call. Simple, one collective; memory for all keys and values while it runs.

Keys are put back in order, so that the kernel meets the tiles that one process would meet. They are
not kept for the backward pass, which gathers them again: memory between the passes is that of the
shards. Gradients of keys and values are summed at their owners, in rank order, in float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from levelhead import _core, state
from levelhead.distributed import local
from levelhead.distributed.call import Agreement
from levelhead.distributed.local import Block, Result, Rows
from levelhead.distributed.plan import Cargo, Seen
from levelhead.distributed.trace import timed
from levelhead.state import State
from levelhead.torch.operators import memory, wide


def forward(call: Agreement, k: Tensor, v: Tensor, *, stats: bool) -> Seen:
    """This rank's rows over all keys."""
    seen, made = attend(call, call.rows, _whole(call, k, v), stats=stats)
    if call.verify:
        assert made is not None
        call.confirm(call.check_counts(made.counts[..., state.COUNT], call.rows))
    return seen


def attend(call: Agreement, rows: Rows, block: Block, *, stats: bool) -> tuple[Seen, State | None]:
    """One kernel call over all keys, and the states if anybody looks at them."""
    shape = tuple(rows.q.shape[:-1])
    out = rows.q.new_empty((*shape, block.v.shape[-1]))
    logsumexp = rows.q.new_empty(shape, dtype=wide(rows.q.dtype))
    into: dict[str, Any] = {"out": memory(out), "logsumexp": memory(logsumexp)}
    made: State | None = None
    if stats:
        made = local.unwritten(rows, block)
        assert made.acc is not None
        into |= {"sums": made.sums, "counts": made.counts, "acc": made.acc}
    elif call.verify:
        real = memory(logsumexp).dtype
        sums = np.empty((*shape, len(state.SUMS)), real)
        made = State(sums, np.empty((*shape, len(state.COUNTS)), np.int64), None, block.k.shape[-2])
        into |= {"sums": made.sums, "counts": made.counts}
    with timed(call.wire.trace, "compute", "forward"):
        _core.forward(
            memory(rows.q),
            memory(block.k),
            memory(block.v),
            sinks=rows.sink_logits(),
            **into,
            **rows.keywords(block.runs, rows.columns(block.runs)),
        )
    return Seen(out, logsumexp, made if stats else None), made


def backward(
    call: Agreement, k: Tensor, v: Tensor, result: Result, kept: tuple[Tensor, ...], wanted: set[str]
) -> dict[str, Tensor]:
    """Gradients by name; those of keys and values from every rank's rows."""
    block = _whole(call, k, v)
    found = room(call.rows, wanted)
    real = wide(k.dtype)
    shared = {"k": block.k, "v": block.v}
    found |= {x: torch.empty(y.shape, dtype=real) for x, y in shared.items() if x in wanted}
    local.differentiate(call.rows, block, result, found, call.wire.trace)
    if wanted & {"k", "v"}:
        found |= _to_owners(call, k, v, found, wanted)
    return found


def room(rows: Rows, wanted: set[str]) -> dict[str, Tensor]:
    """Memory for the gradients that one kernel call gives whole."""
    found: dict[str, Tensor] = {}
    if "q" in wanted:
        found["q"] = torch.empty_like(rows.q)
    if "mask" in wanted and rows.mask is not None:
        found["mask"] = torch.zeros(rows.mask.shape, dtype=wide(rows.q.dtype))
    for name in {"scale", "sinks"} & wanted:
        found[name] = torch.empty(rows.scale.shape, dtype=torch.float64)
    return found


def _whole(call: Agreement, k: Tensor, v: Tensor) -> Block:
    """All keys and values, by position."""
    split = call.keys
    cargo = Cargo(k, v, split)
    mine = torch.empty(cargo.most, dtype=k.dtype)
    mine[cargo.pack(k, v, mine).numel() :] = 0
    parts = call.wire.gather(mine, "gathering keys and values")
    whole = [x.new_empty((*x.shape[:-2], split.n, x.shape[-1])) for x in (k, v)]
    for rank, part in enumerate(parts):
        for x, shard in zip(whole, cargo.parts(part, split.lengths[rank]), strict=True):
            split.place(x, rank, shard)
    return Block(whole[0], whole[1], ((0, split.n, 1),) if split.n else ())


def _to_owners(call: Agreement, k: Tensor, v: Tensor, found: dict[str, Tensor], wanted: set[str]) -> dict[str, Tensor]:
    """The gradients of this rank's keys and values, from the parts of all ranks."""
    split, wire = call.keys, call.wire
    none = {"k": k, "v": v}
    names = [name for name in ("k", "v") if name in wanted]
    parts = [torch.cat([split.shard(found[name], rank).reshape(-1) for name in names]) for rank in range(wire.world)]
    numbers = sum(none[name].numel() for name in names)
    heard = wire.exchange(parts, [numbers] * wire.world, "summing the gradients of keys and values")
    total = heard[0].clone()
    for part in heard[1:]:
        total += part
    sizes = [none[name].numel() for name in names]
    split_up = zip(names, torch.split(total, sizes), strict=True)
    return {name: x.view(none[name].shape) for name, x in split_up}
