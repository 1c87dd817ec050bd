"""Plan "ulysses": tokens of all heads for all tokens of some heads, and back. Every rank computes
its heads as one process would, with the same bits; the numbers of heads must divide.

An exchange brings queries, keys, values (and a mask's rows) over, another brings the output back;
in the backward pass likewise. What is given per head is cut; dropout is told which heads these are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from levelhead import state
from levelhead.call.options import HEADS, fields
from levelhead.distributed import gathered, local
from levelhead.distributed.call import Agreement, gathered_ids
from levelhead.distributed.local import Block, Result, Rows
from levelhead.distributed.plan import Seen
from levelhead.distributed.split import Split
from levelhead.errors import LevelheadValueError, expected
from levelhead.state import State


def refuse(H: int, G: int, world: int) -> None:
    """Heads that cannot be dealt out evenly."""
    for name, heads in (("q", H), ("k", G)):
        if heads % world:
            what = f"heads that divide by the {world} ranks in plan 'ulysses'"
            advice = 'Use plan="all-gather" or "ring", or fewer ranks'
            raise LevelheadValueError(expected(name, what, f"{heads} heads", advice))


def forward(call: Agreement, k: Tensor, v: Tensor, *, stats: bool) -> Seen:
    """This rank's rows over all keys: some heads of all rows first, then all heads of its own."""
    rows, block, _ = _some_heads(call, k, v, ())
    seen, made = gathered.attend(call, rows, block, stats=stats)
    if call.verify:
        assert made is not None
        call.confirm(call.check_counts(made.counts[..., state.COUNT], rows))
    (out,) = _to_tokens(call, [(seen.out, call.queries)])
    kept = (seen.out, seen.logsumexp)
    if not stats:
        return Seen(out, seen.logsumexp.new_empty(0), None, kept)
    assert made is not None and made.acc is not None
    real = [torch.from_numpy(x) for x in (made.sums, made.acc)]
    lse, sums, acc = _to_tokens(call, [(x, call.queries) for x in (seen.logsumexp[..., None], *real)])
    (counts,) = _to_tokens(call, [(torch.from_numpy(made.counts), call.queries)])
    whole = State(sums.numpy(), counts.numpy(), acc.numpy(), made.keys)
    return Seen(out, lse[..., 0].contiguous(), whole, kept)


def backward(
    call: Agreement, k: Tensor, v: Tensor, result: Result, kept: tuple[Tensor, ...], wanted: set[str]
) -> dict[str, Tensor]:
    """Gradients by name. Those per head are of this rank's heads, and 0 for the others."""
    out, logsumexp = kept
    moved = [result.dout.to(k.dtype)]
    rows, block, (dout,) = _some_heads(call, k, v, moved)
    dlse: Tensor | None = None
    if result.dlogsumexp is not None:
        given = result.dlogsumexp.to(logsumexp.dtype)[..., None]
        (dlse,) = _to_heads(call, [(given, call.queries)])
        dlse = dlse[..., 0]
    found = gathered.room(rows, wanted)
    shared = {"k": block.k, "v": block.v}
    found |= {name: torch.empty_like(x) for name, x in shared.items() if name in wanted}
    trace = call.wire.trace
    local.differentiate(rows, block, Result(out, logsumexp, dout, dlse), found, trace)
    splits = {"q": call.queries, "k": call.keys, "v": call.keys}
    names = [name for name in splits if name in wanted]
    back = _to_tokens(call, [(found[name], splits[name]) for name in names]) if names else []
    found |= dict(zip(names, back, strict=True))
    own = _heads(call, call.rows.scale.shape[0])
    for name in {"scale", "sinks"} & wanted:
        whole = torch.zeros(call.rows.scale.shape, dtype=torch.float64)
        whole[own] = found[name]
        found[name] = whole
    if "mask" in found:
        found["mask"] = _mask_home(call, found["mask"])
    return found


def _heads(call: Agreement, heads: int) -> slice:
    """This rank's among so many heads."""
    each = heads // call.wire.world
    return slice(call.wire.rank * each, (call.wire.rank + 1) * each)


def _some_heads(call: Agreement, k: Tensor, v: Tensor, more: Sequence[Tensor]) -> tuple[Rows, Block, list[Tensor]]:
    """All rows and all keys for this rank's heads; `more` are tensors that lie like the queries."""
    rows, wire = call.rows, call.wire
    moved = [(rows.q, call.queries), (k, call.keys), (v, call.keys)]
    q, k, v, *rest = _to_heads(call, moved + [(x, call.queries) for x in more])
    own = _heads(call, rows.scale.shape[0])
    options: dict[str, Any] = dict(rows.options)
    for name in fields(HEADS):
        if name in options:
            options[name] = np.ascontiguousarray(options[name][own])
    if "dropout" in options:
        options["first_head"] = own.start
    ids = rows.query_ids
    new = replace(
        rows,
        q=q,
        runs=_all(call.queries),
        scale=rows.scale[own],
        options=options,
        mask=_mask_over(call),
        sinks=None if rows.sinks is None else rows.sinks[own],
        query_ids=None if ids is None else gathered_ids(wire, call.queries, ids),
    )
    return new, Block(k, v, _all(call.keys)), rest


def _all(split: Split) -> tuple[tuple[int, int, int], ...]:
    return ((0, split.n, 1),) if split.n else ()


# ---- a mask: rows of this rank's queries, of one head or of all


def _mask_over(call: Agreement) -> Tensor | None:
    """The mask's rows of all queries, for this rank's heads."""
    mask = call.rows.mask
    if mask is None:
        return None
    mask = _with_rows(call, mask.detach())
    if mask.shape[-3] > 1:
        return _to_heads(call, [(mask, call.queries)])[0]
    split = call.queries
    room = mask.new_zeros((*mask.shape[:-2], max(split.lengths), mask.shape[-1]))
    room[..., : mask.shape[-2], :] = mask
    whole = mask.new_empty((*mask.shape[:-2], split.n, mask.shape[-1]))
    for rank, part in enumerate(call.wire.gather(room, "gathering the mask")):
        split.place(whole, rank, part[..., : split.lengths[rank], :])
    return whole


def _mask_home(call: Agreement, dmask: Tensor) -> Tensor:
    """The gradient of this rank's mask, from what its heads, or all ranks, found."""
    mask, split, wire = call.rows.mask, call.queries, call.wire
    assert mask is not None
    if _with_rows(call, mask).shape[-3] > 1:
        (found,) = _to_tokens(call, [(dmask, split)])
    else:
        parts = [split.shard(dmask, rank) for rank in range(wire.world)]
        numbers = [parts[wire.rank].numel()] * wire.world
        heard = wire.exchange(parts, numbers, "summing the gradient of the mask")
        found = torch.stack([x.view(parts[wire.rank].shape) for x in heard]).sum(0)
    return found.sum_to_size(mask.shape)


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
    shapes = [[_dealt(x, world, split.lengths[other]) for x, split in moved] for other in range(world)]
    numbers = [sum(map(math.prod, each)) for each in shapes]
    heard = call.wire.exchange(parts, numbers, "dealing out heads")
    found = [x.new_empty(_dealt(x, world, split.n)) for x, split in moved]
    for other, flat in enumerate(heard):
        pieces = torch.split(flat, [math.prod(shape) for shape in shapes[other]])
        for i, (_, split) in enumerate(moved):
            split.place(found[i], other, pieces[i].view(shapes[other][i]))
    return found


def _dealt(x: Tensor, world: int, tokens: int) -> tuple[int, ...]:
    """The shape of one rank's heads of so many tokens."""
    return (*x.shape[:-3], x.shape[-3] // world, tokens, x.shape[-1])


def _to_tokens(call: Agreement, moved: Sequence[tuple[Tensor, Split]]) -> list[Tensor]:
    """The way back: (..., own heads, all tokens, d) to (..., heads, own tokens, d)."""
    world, rank = call.wire.world, call.wire.rank
    parts = [torch.cat([split.shard(x, other).reshape(-1) for x, split in moved]) for other in range(world)]
    shapes = [(*x.shape[:-2], split.lengths[rank], x.shape[-1]) for x, split in moved]
    sizes = [math.prod(shape) for shape in shapes]
    heard = call.wire.exchange(parts, [sum(sizes)] * world, "dealing out tokens")
    pieces = [torch.split(flat, sizes) for flat in heard]
    return [torch.cat([each[i].view(shape) for each in pieces], -3) for i, shape in enumerate(shapes)]
