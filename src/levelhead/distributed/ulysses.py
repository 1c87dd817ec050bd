"""Plan "ulysses": each rank trades its tokens of all heads for all tokens of some heads, and back. Every rank computes
its heads as one process would, with the same bits; the numbers of heads must be divisible by the number of ranks.

One exchange moves queries, keys, values (and a mask's rows), another moves the output back; likewise in the backward
pass. Per-head arguments are cut; dropout gets the number of the first head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from levelhead.call.options import HEADS, fields
from levelhead.distributed import gathered, local
from levelhead.distributed.call import Agreement, gathered_ids
from levelhead.distributed.local import KeyBlock, OutputGradients, QueryRows
from levelhead.distributed.plan import ForwardResult, buffers
from levelhead.distributed.split import Split, all_positions
from levelhead.distributed.whole import gathered_shards
from levelhead.state import State


def forward(call: Agreement, own: KeyBlock, *, stats: bool, precise: bool) -> ForwardResult:
    """This rank's rows over all keys: some heads of all rows first, then all heads of its own."""
    rows, block, _ = _some_heads(call, own, ())
    result = gathered.attend(call, rows, block, stats=stats, precise=precise)
    (out,) = _to_tokens(call, [(result.out, call.queries)])
    kept = (result.out if result.exact is None else result.exact, result.logsumexp)
    states = result.state
    if states is None:
        return ForwardResult(out, result.logsumexp.new_empty(0), None, kept)
    real = [torch.from_numpy(x) for x in (states.sums, states.acc)]
    lse, sums, acc = _to_tokens(call, [(x, call.queries) for x in (result.logsumexp[..., None], *real)])
    (counts,) = _to_tokens(call, [(torch.from_numpy(states.counts), call.queries)])
    whole = State(sums.numpy(), counts.numpy(), acc.numpy(), states.keys)
    return ForwardResult(out, lse[..., 0].contiguous(), whole, kept)


def backward(call: Agreement, own: KeyBlock, gradients: OutputGradients, wanted: set[str]) -> dict[str, Tensor]:
    """Gradients by name. Those per head are of this rank's heads, and 0 for the others."""
    out, logsumexp = gradients.kept
    rows, block, (dout,) = _some_heads(call, own, [gradients.dout.to(own.k.dtype)])
    dlse: Tensor | None = None
    if gradients.dlogsumexp is not None:
        (dlse,) = _to_heads(call, [(gradients.dlogsumexp.to(logsumexp.dtype)[..., None], call.queries)])
        dlse = dlse[..., 0]
    grads = buffers(rows, wanted, dtype=rows.q.dtype)
    grads |= {name: torch.empty_like(x) for name, x in block.named(wanted).items()}
    local.differentiate(rows, block, OutputGradients(out, logsumexp, dout, dlse), grads, call.wire.trace)
    splits = {"q": call.queries, "k": call.keys, "v": call.keys}
    names = [name for name in splits if name in wanted]
    back = _to_tokens(call, [(grads[name], splits[name]) for name in names]) if names else []
    grads |= dict(zip(names, back, strict=True))
    for name in {"scale", "sinks"} & wanted:
        whole = torch.zeros(call.rows.scale.shape, dtype=torch.float64)
        whole[_heads(call)] = grads[name]
        grads[name] = whole
    if "mask" in grads:
        grads["mask"] = _mask_home(call, grads["mask"])
    return grads


def _heads(call: Agreement) -> slice:
    """This rank's heads."""
    each = call.rows.scale.shape[0] // call.wire.world
    return slice(call.wire.rank * each, (call.wire.rank + 1) * each)


def _some_heads(call: Agreement, own: KeyBlock, more: Sequence[Tensor]) -> tuple[QueryRows, KeyBlock, list[Tensor]]:
    """All rows and all keys for this rank's heads; `more` are tensors sharded like the queries."""
    rows, heads = call.rows, _heads(call)
    moved = [(rows.q, call.queries), (own.k, call.keys), (own.v, call.keys)]
    q, k, v, *rest = _to_heads(call, moved + [(x, call.queries) for x in more])
    options: dict[str, Any] = dict(rows.options)
    for name in fields(HEADS):
        if name in options:
            options[name] = np.ascontiguousarray(options[name][heads])
    if "dropout" in options:
        options["first_head"] = heads.start
    ids = rows.ids
    new = replace(
        rows,
        q=q,
        runs=all_positions(call.queries),
        scale=rows.scale[heads],
        options=options,
        mask=_mask_over(call),
        sinks=None if rows.sinks is None else rows.sinks[heads],
        ids=None if ids is None else (gathered_ids(call.wire, call.queries, ids[0]), ids[1]),
    )
    return new, KeyBlock(k, v, all_positions(call.keys)), rest


# ---- a mask: rows of this rank's queries, of one head or of all


def _mask_over(call: Agreement) -> Tensor | None:
    """The mask's rows of all queries, for this rank's heads."""
    mask = call.rows.mask
    if mask is None:
        return None
    mask = _with_rows(call, mask.detach())
    if mask.shape[-3] > 1:
        return _to_heads(call, [(mask, call.queries)])[0]
    return gathered_shards(call.wire, mask, call.queries, -2, "gathering the mask")


def _mask_home(call: Agreement, dmask: Tensor) -> Tensor:
    """The gradient of this rank's mask, from the ranks that have its heads."""
    mask, split, wire = call.rows.mask, call.queries, call.wire
    assert mask is not None
    if _with_rows(call, mask).shape[-3] > 1:
        (grad,) = _to_tokens(call, [(dmask, split)])
    else:
        parts = [split.shard(dmask, rank) for rank in range(wire.world)]
        numbers = [parts[wire.rank].numel()] * wire.world
        received = wire.exchange(parts, numbers, "summing the gradient of the mask")
        grad = torch.stack([x.view(parts[wire.rank].shape) for x in received]).sum(0)
    return grad.sum_to_size(mask.shape)


def _with_rows(call: Agreement, mask: Tensor) -> Tensor:
    """The mask with axes for heads and for every row."""
    while mask.dim() < 3:
        mask = mask[None]
    return mask.expand((*mask.shape[:-2], call.rows.q.shape[-2], mask.shape[-1]))


# ---- the two exchanges


def _to_heads(call: Agreement, moved: Sequence[tuple[Tensor, Split]]) -> list[Tensor]:
    """(..., heads, own tokens, d) to (..., own heads, all tokens, d), all in one message."""
    world = call.wire.world
    parts = [torch.cat([x.detach().chunk(world, -3)[other].reshape(-1) for x, _ in moved]) for other in range(world)]
    shapes = [[_shape_per_rank(x, world, split.lengths[other]) for x, split in moved] for other in range(world)]
    numbers = [sum(map(math.prod, each)) for each in shapes]
    received = call.wire.exchange(parts, numbers, "dealing out heads")
    moved_in = [x.new_empty(_shape_per_rank(x, world, split.n)) for x, split in moved]
    for other, flat in enumerate(received):
        pieces = torch.split(flat, [math.prod(shape) for shape in shapes[other]])
        for i, (_, split) in enumerate(moved):
            split.place(moved_in[i], other, pieces[i].view(shapes[other][i]))
    return moved_in


def _shape_per_rank(x: Tensor, world: int, tokens: int) -> tuple[int, ...]:
    """The shape of one rank's heads of so many tokens."""
    return (*x.shape[:-3], x.shape[-3] // world, tokens, x.shape[-1])


def _to_tokens(call: Agreement, moved: Sequence[tuple[Tensor, Split]]) -> list[Tensor]:
    """The inverse: (..., own heads, all tokens, d) to (..., heads, own tokens, d)."""
    world, rank = call.wire.world, call.wire.rank
    parts = [torch.cat([split.shard(x, other).reshape(-1) for x, split in moved]) for other in range(world)]
    shapes = [(*x.shape[:-2], split.lengths[rank], x.shape[-1]) for x, split in moved]
    sizes = [math.prod(shape) for shape in shapes]
    received = call.wire.exchange(parts, [sum(sizes)] * world, "dealing out tokens")
    pieces = [torch.split(flat, sizes) for flat in received]
    return [torch.cat([each[i].view(shape) for each in pieces], -3) for i, shape in enumerate(shapes)]
