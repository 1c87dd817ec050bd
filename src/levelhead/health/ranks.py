"""One step of all ranks together: one packed tensor, gathered once.

Called at log time, never while a model runs. Ranks that watch the same modules add up; ranks whose
modules or heads differ are refused on every rank alike, because what each packed says so.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from levelhead.errors import LevelheadValueError, expected
from levelhead.health import tally
from levelhead.health.record import Record, Snapshot


def gathered(snapshot: Snapshot, group: Any = None) -> Snapshot:
    """The snapshots of all ranks of a group as one, folded in the order of the ranks.

    A rank that saw nothing in this step must still call; it adds nothing, and gets nothing.
    """
    import torch.distributed as dist

    device, world = _device(dist, group), dist.get_world_size(group)
    names = "\n".join(f"{record.module}:{len(record.tally)}" for record in snapshot.records)
    rows = sum(len(record.tally) for record in snapshot.records)
    layout = torch.tensor([zlib.crc32(names.encode()), rows], device=device)
    layouts = [torch.empty_like(layout) for _ in range(world)]
    dist.all_gather(layouts, layout, group=group)  # two numbers, so that a mistake is no hang
    seen = [tuple(x.tolist()) for x in layouts]
    kinds = {kind for kind in seen if kind[1]}
    if len(kinds) > 1:
        given = ", ".join(f"{n} heads on rank {rank}" for rank, (_, n) in enumerate(seen))
        advice = "Watch the same model with the same options on every rank"
        raise LevelheadValueError(expected("ranks", "the same modules everywhere", given, advice))
    total = max(n for _, n in seen)
    mine = np.concatenate([record.tally for record in snapshot.records] or [tally.nothing(total)])
    packed = torch.from_numpy(mine).to(device)
    everything = [torch.empty_like(packed) for _ in range(world)]
    dist.all_gather(everything, packed, group=group)
    whole = tally.nothing(total)
    for part in everything:
        whole = tally.merge(whole, part.cpu().numpy())
    records: list[Record] = []
    for record in snapshot.records:
        records.append(replace(record, tally=whole[: len(record.tally)]))
        whole = whole[len(record.tally) :]
    return Snapshot(snapshot.step, tuple(records))


def _device(dist: Any, group: Any) -> torch.device:
    """Where the group's back end wants its tensors."""
    return torch.device("cuda") if dist.get_backend(group) == "nccl" else torch.device("cpu")
