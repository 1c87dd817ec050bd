"""Problems that are spread over ranks: the whole, each rank's part, and what comes back of it.

Shared by the tests of `lh.distributed` and by the ranks they start; holds no test. A case is
described by words and numbers alone, so that every process makes the same arrays of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import levelhead as lh
from levelhead.distributed import Split
from levelhead.stats import Rows
from ranks import TIMEOUT

FEATURES = (
    "plain",
    "causal",
    "window",
    "bool-mask",
    "bias",
    "row-bias",
    "head-bias",
    "softcap",
    "alibi",
    "sinks",
    "key_lengths",
    "query_lengths",
    "segments",
    "dropout",
    "cosine",
    "log-n",
    "log-n-segments",
    "scale",
    "per-head-scale",
    "query_start",
)
PLANS = ("all-gather", "ring", "decode", "ulysses")
SPLITS = ("contiguous", "zigzag", "striped", "blocks", "ragged", "crossed")
BATCH, D, E = 2, 8, 6


def split_of(kind: str, n: int, world: int) -> Split:
    """A split by name; "ragged" leaves the first and the last of three and more ranks nothing."""
    if kind == "blocks":
        return Split.striped(n, world, block=5)
    if kind == "ragged":
        inner = Split.contiguous(n, max(world - 2, 1)).lengths if world > 2 else ()
        lengths = (0, *inner, 0) if world > 2 else (n - 3, 3)[:world] if world == 2 else (n,)
        return Split.lengths_in_order(lengths)
    made: Split = getattr(Split, kind)(n, world)
    return made


@dataclass(frozen=True)
class Case:
    """One call, and how it is spread."""

    plan: str
    feature: str
    split: str
    world: int
    n: int = 83  # queries, and keys unless crossed; 20 on each of 4 ranks: above the few queries
    dtype: str = "float32"

    @property
    def heads(self) -> int:
        return 2 * self.world

    @property
    def keys(self) -> int:
        return self.n + 18 if self.split == "crossed" else self.n

    @cached_property
    def splits(self) -> tuple[Split, Split]:
        """Of queries and of keys."""
        kinds = ("zigzag", "striped") if self.split == "crossed" else (self.split, self.split)
        queries, keys = (split_of(kind, n, self.world) for kind, n in zip(kinds, (self.n, self.keys), strict=True))
        return queries, keys

    @cached_property
    def arrays(self) -> dict[str, Tensor]:
        """q, k, v and the gradients of a loss by output and logsumexp, of the whole sequence."""
        draw = torch.Generator().manual_seed(11)
        shapes = {
            "q": (BATCH, self.heads, self.n, D),
            "k": (BATCH, self.world, self.keys, D),
            "v": (BATCH, self.world, self.keys, E),
            "dout": (BATCH, self.heads, self.n, E),
        }
        kind = getattr(torch, self.dtype)
        made = {
            name: torch.randn(shape, generator=draw, dtype=torch.float64).to(kind) for name, shape in shapes.items()
        }
        wide = torch.float64 if self.dtype == "float64" else torch.float32
        shape = shapes["q"][:-1]
        return made | {"dlse": torch.randn(shape, generator=draw, dtype=torch.float64).to(wide)}

    @cached_property
    def options(self) -> dict[str, Any]:
        """Of `lh.attention`, for the whole sequence."""
        draw = torch.Generator().manual_seed(7)
        T, S, H = self.n, self.keys, self.heads

        def floats(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw)

        made: dict[str, dict[str, Any]] = {
            "plain": {},
            "causal": {"causal": True},
            "window": {"window": (S // 3, 2)},
            "bool-mask": {"mask": torch.rand((H, T, S), generator=draw) < 0.7},
            "bias": {"mask": floats(T, S)},
            "row-bias": {"mask": floats(BATCH, 1, T, 1)},
            "head-bias": {"mask": floats(H, 1, S)},
            "lowest": {"mask": torch.where(torch.arange(T)[:, None] % 3 == 0, -1e38, floats(T, S))},
            "softcap": {"softcap": 1.5},
            "alibi": {"alibi": True, "causal": True},
            "sinks": {"sinks": floats(H)},
            "key_lengths": {"key_lengths": [S - 9, 5]},
            "query_lengths": {"query_lengths": [max(T - 9, 0), min(5, T)], "sinks": floats(H)},
            "segments": {"segments": (torch.arange(T) * 3 // T, torch.arange(S) * 3 // S)},
            "dropout": {"dropout": 0.3, "seed": 5},
            "cosine": {"scale": "cosine"},
            "log-n": {"scale": "log-n", "causal": True},
            "log-n-segments": {"scale": "log-n", "segments": (torch.arange(T) % 3, torch.arange(S) % 4)},
            "scale": {"scale": torch.tensor(0.4, dtype=torch.float64)},
            "per-head-scale": {"scale": torch.rand(H, generator=draw, dtype=torch.float64)},
            "query_start": {"query_start": [2, -3], "causal": True},
        }
        return made[self.feature]

    def part(self, rank: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """A rank's arrays and options."""
        queries, keys = self.splits
        everybody = self.plan == "decode"
        arrays = {
            name: x
            if everybody and name not in "kv"
            else keys.shard(x, rank)
            if name in "kv"
            else queries.shard(x, rank, -1 if name == "dlse" else -2)
            for name, x in self.arrays.items()
        }
        options = dict(self.options)
        mask = options.get("mask")
        if mask is not None and mask.shape[-2] > 1 and not everybody:
            options["mask"] = queries.shard(mask, rank)
        if "segments" in options:
            ids, key_ids = options["segments"]
            ids = ids if everybody else queries.shard(ids, rank, -1)
            options["segments"] = (ids, keys.shard(key_ids, rank, -1))
        return arrays, options


LEARNED = ("q", "k", "v", "scale", "mask", "sinks")


def learning(arrays: dict[str, Tensor], options: dict[str, Any]) -> dict[str, Tensor]:
    """Copies of everything that has a gradient, put in place of what was there."""
    found: dict[str, Tensor] = {}
    for name in LEARNED:
        where = arrays if name in arrays else options
        x = where.get(name)
        if isinstance(x, Tensor) and x.is_floating_point():
            found[name] = where[name] = x.clone().requires_grad_()
    return found


@dataclass(frozen=True)
class Found:
    """What came of a case: of one process, or of a rank."""

    out: Tensor
    logsumexp: Tensor
    rows: Rows
    plain: Tensor  # the output of `attention`, without statistics
    gradients: dict[str, Tensor]


def compute(arrays: dict[str, Tensor], options: dict[str, Any], call: Any, **more: Any) -> Found:
    """Everything that a module's `observe` and `attention` give."""
    arrays = dict(arrays)
    options = dict(options)
    learned = learning(arrays, options)
    q, k, v = (arrays[name] for name in "qkv")
    seen = call.observe(q, k, v, **options, **more)
    lse = seen.logsumexp
    lse = torch.where(lse == -torch.inf, torch.zeros_like(lse), lse)
    ((seen.output * arrays["dout"]).sum() + (lse * arrays["dlse"]).sum()).backward()
    with torch.no_grad():
        plain = call.attention(q, k, v, **options, **more)
    gradients = {name: x.grad for name, x in learned.items() if x.grad is not None}
    return Found(seen.output.detach(), seen.logsumexp.detach(), seen.rows, plain, gradients)


_groups: dict[int, Any] = {}


def group_of(world: int) -> Any:
    """The first so many ranks; all ranks of the process group must ask for the same."""
    if not _groups:
        for size in range(1, dist.get_world_size() + 1):
            _groups[size] = dist.new_group(list(range(size)), timeout=timedelta(seconds=TIMEOUT))
    return _groups[world]


def work(rank: int, cases: list[Case]) -> list[Found | None]:
    """What a rank finds in each case; None in those of fewer ranks."""
    found: list[Found | None] = []
    for case in cases:
        group = group_of(case.world)
        if rank >= case.world:
            found.append(None)
            continue
        arrays, options = case.part(rank)
        more = {"group": group, "plan": case.plan, "split": case.splits}
        found.append(compute(arrays, options, lh.distributed, **more))
    return found


def alone(case: Case) -> Found:
    """What one process finds."""
    return compute(case.arrays, case.options, lh)


def together(case: Case, parts: list[Found]) -> Found:
    """The whole, put together from what the ranks found."""
    queries, keys = case.splits
    if case.plan == "decode":
        first, join = parts[0], None
        whole = first
    else:
        first, join = parts[0], queries.unshard
        fields = {name: join([getattr(part.rows, name) for part in parts], -1) for name in Rows.__dataclass_fields__}
        whole = Found(
            join([part.out for part in parts]),
            join([part.logsumexp for part in parts], -1),
            Rows(**fields),
            join([part.plain for part in parts]),
            {},
        )
    gradients: dict[str, Tensor] = {}
    for name in first.gradients:
        given = [part.gradients[name] for part in parts]
        if name in "kv":
            gradients[name] = keys.unshard(given)
        elif case.plan == "decode":  # whole, on every rank
            gradients[name] = given[0]
        elif name == "q" or (name == "mask" and case.options["mask"].shape[-2] > 1):
            gradients[name] = queries.unshard(given)
        else:
            gradients[name] = torch.stack(given).sum(0)
    return replace(whole, gradients=gradients)


def numpy(x: Tensor) -> Any:
    """A tensor as NumPy has it, bfloat16 included."""
    if x.dtype is torch.bfloat16:
        import ml_dtypes

        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def plain_options(case: Case) -> dict[str, Any]:
    """The options as the reference takes them."""
    return {
        name: tuple(map(np.asarray, x))
        if isinstance(x, tuple) and name == "segments"
        else x.numpy()
        if isinstance(x, Tensor)
        else x
        for name, x in case.options.items()
    }
