"""One step of all ranks together: one packed tensor, gathered once.

Called at log time, never while a model runs. Tallies of ranks that watch the same heads add up (data and context
parallelism); ranks with heads of their own are put side by side (tensor parallelism). If modules differ, every rank
raises the same error, because each has the layouts of all.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from levelhead.errors import bad_value
from levelhead.runs import tally
from levelhead.runs.record import Record, Snapshot


def gathered(snapshot: Snapshot, group: Any = None, *, heads: str = "same") -> Snapshot:
    """The snapshots of all ranks of a group as one, in the order of the ranks.

    A rank that recorded nothing in this step must still call; it adds nothing, and gets nothing.

    Args:
        heads: "same": every rank's rows of the same heads add up. "split": each rank has heads of its own, as many as
            the others.
    """
    import torch.distributed as dist

    if heads not in ("same", "split"):
        raise bad_value("heads", "'same' or 'split'", repr(heads), "Pass split where heads are spread over ranks")
    if not dist.is_available() or not dist.is_initialized():
        advice = "Call init_process_group first; in one process, read w.last"
        raise bad_value("group", "torch.distributed to be running", "no process group", advice)
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    world = dist.get_world_size(group)
    lines = [f"{r.module}:{len(r.tally)}:{[*r.counterfactual]}" for r in snapshot.records]
    names = "\n".join([heads, *lines])
    parts = [x for r in snapshot.records for x in (r.tally, *r.counterfactual.values())]
    watched = sum(len(record.tally) for record in snapshot.records)
    layout = torch.tensor([zlib.crc32(names.encode()), sum(map(len, parts)), watched], device=device)
    layouts = [torch.empty_like(layout) for _ in range(world)]
    dist.all_gather(layouts, layout, group=group)  # three numbers first, so that a mistake is an error, not a hang
    sizes_by_rank = [tuple(x.tolist()) for x in layouts]
    kinds = {kind for kind in sizes_by_rank if kind[1]}
    if len(kinds) > 1:
        given = ", ".join(f"{n} heads on rank {rank}" for rank, (_, _, n) in enumerate(sizes_by_rank))
        advice = "Watch the same model with the same options on every rank"
        raise bad_value("ranks", "the same modules everywhere", given, advice)
    total = max(n for _, n, _ in sizes_by_rank)
    packed = torch.from_numpy(np.concatenate(parts or [tally.nothing(total)])).to(device)
    everything = [torch.empty_like(packed) for _ in range(world)]
    dist.all_gather(everything, packed, group=group)
    ends = np.cumsum([len(part) for part in parts])[:-1]
    if heads == "split":
        cut = [np.split(part.cpu().numpy(), ends) for part in everything]
        rest = iter([np.concatenate(pieces) for pieces in zip(*cut, strict=True)])
    else:
        whole = tally.nothing(total)
        for part in everything:
            whole = tally.merge(whole, part.cpu().numpy())
        rest = iter(np.split(whole, ends))
    times = world if heads == "split" else 1
    return Snapshot(snapshot.step, tuple(_joined(r, rest, times) for r in snapshot.records))


def _joined(record: Record, rest: Iterator[tally.Floats], times: int) -> Record:
    """A record with its next tallies; `times` as many heads as one rank had."""
    whole = next(rest)
    rules = {rule: next(rest) for rule in record.counterfactual}
    if times > 1:
        rules.pop("1/sqrt(d)", None)  # computed from the width that one rank sees, not the model's
    facts = replace(record.facts, kv_heads=record.facts.kv_heads * times)
    return replace(record, tally=whole, counterfactual=rules, facts=facts)
