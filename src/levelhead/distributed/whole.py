"""A sharded tensor assembled on every rank: to inspect results and for tests, not for training.

It is not differentiable.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from levelhead.distributed.agree import agree, mark, next_call
from levelhead.distributed.split import Split
from levelhead.distributed.wire import Wire
from levelhead.errors import LevelheadError, bad_value


def gather(x: Tensor, split: Split | None = None, *, group: Any = None, dim: int = -2, timeout: Any = None) -> Tensor:
    """The whole tensor, by position, from every rank's shard; all ranks must call it, and all get the result.

    Args:
        x: this rank's shard.
        split: which rank has which positions; None: one rank after another, in order.
        dim: the dimension of the tokens.
    """
    wire = Wire(group, timeout, None)
    sizes = list(x.shape)
    tokens = sizes.pop(dim)
    same = {"shape but for tokens": mark(sizes, len(x.shape), dim), "dtype": mark(str(x.dtype))}
    same["split"] = 0 if split is None else split.fingerprint
    refusal: LevelheadError | None = None
    if split is not None and (split.world, split.lengths[wire.rank : wire.rank + 1]) != (wire.world, (tokens,)):
        wanted = f"{wire.world} shards, of which this one has {tokens} tokens"
        refusal = bad_value("split", wanted, split.lengths, "Give the split that x was sharded with")
    step = f"call {next_call(wire)} of this group, levelhead.distributed.gather"
    table = agree(wire, step, same, {"tokens": tokens}, refusal)
    if split is None:
        split = Split.lengths_in_order([row["tokens"] for row in table])
    return gathered_shards(wire, x, split, dim, "gathering a tensor")


def gathered_shards(wire: Wire, x: Tensor, split: Split, dim: int, what: str) -> Tensor:
    """The whole tensor from every rank's shard x, in one collective: shards are padded to the longest."""
    padded = x.new_zeros([*x.shape[:dim], max(split.lengths), *x.shape[dim:][1:]])
    padded.narrow(dim, 0, x.shape[dim]).copy_(x.detach())
    parts = zip(wire.gather(padded, what), split.lengths, strict=True)
    whole: Tensor = split.unshard([part.narrow(dim, 0, n) for part, n in parts], dim)
    return whole
