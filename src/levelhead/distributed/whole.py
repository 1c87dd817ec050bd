"""A sharded tensor made whole on every rank: for a look at results and for tests, not for training.

No gradient goes back through it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from levelhead.distributed.agree import agree, mark, next_call
from levelhead.distributed.split import Split
from levelhead.distributed.wire import Wire
from levelhead.errors import LevelheadError, LevelheadValueError, expected


def gather(x: Tensor, split: Split | None = None, *, group: Any = None, dim: int = -2, timeout: Any = None) -> Tensor:
    """The whole of which every rank has a shard, by position; every rank calls, and gets it.

    Args:
        x: this rank's shard.
        split: who has what; None: one rank after another, in order.
        dim: along which tokens lie.
    """
    wire = Wire(group, timeout, None)
    sizes = list(x.shape)
    tokens = sizes.pop(dim)
    same = {"shape but for tokens": mark(sizes, len(x.shape), dim), "dtype": mark(str(x.dtype))}
    same["split"] = 0 if split is None else split.fingerprint
    refusal: LevelheadError | None = None
    if split is not None and (split.world, split.lengths[wire.rank : wire.rank + 1]) != (wire.world, (tokens,)):
        what = f"{wire.world} shards, of which this one has {tokens} tokens"
        advice = "Give the split that x was sharded with"
        refusal = LevelheadValueError(expected("split", what, split.lengths, advice))
    step = f"call {next_call(wire)} of this group, levelhead.distributed.gather"
    table = agree(wire, step, same, {"tokens": tokens}, refusal)
    if split is None:
        split = Split.lengths_in_order([row["tokens"] for row in table])
    most = max(split.lengths)
    room = x.new_zeros([*x.shape[:dim], most, *x.shape[dim:][1:]])
    room.narrow(dim, 0, tokens).copy_(x.detach())
    parts = wire.gather(room, "gathering a tensor")
    pairs = zip(parts, split.lengths, strict=True)
    found: Tensor = split.unshard([part.narrow(dim, 0, n) for part, n in pairs], dim)
    return found
