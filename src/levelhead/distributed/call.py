"""A distributed call, described: what is asked on this rank, what all ranks agreed on.

Arguments are checked twice. First alone, so that a mistake on one rank is known before it speaks;
then, when the length of the whole sequence is known, together. Both times by the code that checks
`levelhead.attention`. This file computes nothing and decides no order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from levelhead.attention import options_for_core, team_for
from levelhead.call import arrays, scoring
from levelhead.call.arrays import Array, Origin
from levelhead.call.segments import segment_pair
from levelhead.distributed import counted
from levelhead.distributed.agree import Table, agree, bits, mark, next_call, number
from levelhead.distributed.local import QueryRows
from levelhead.distributed.split import Runs, Split, rising
from levelhead.distributed.wire import Wire
from levelhead.errors import LevelheadError, LevelheadTypeError, LevelheadValueError, expected
from levelhead.torch.operators import LevelheadRuntimeError

PLANS = ("all-gather", "ring", "decode", "ulysses")

# Of the core's keywords, those that the kernel calls of all plans share.
_SHARED = {"cosine", "log_n", "causal", "left", "right", "softcap", "alibi", "key_lengths"}
_SHARED |= {"query_start", "dropout", "seed"}


@dataclass(frozen=True, slots=True)
class Call:
    """What all ranks agreed on, and this rank's rows."""

    wire: Wire
    plan: str
    number: int  # of the group's calls
    queries: Split  # in plan "decode" everybody has all of them: one shard
    keys: Split
    rows: QueryRows
    origin: Origin
    may_overflow: bool  # whether a logit may become -inf and count as hidden
    verify: bool

    @property
    def positions(self) -> Array:
        """Where this rank's rows sit in the sequence of queries."""
        return self.queries.positions(0 if self.plan == "decode" else self.wire.rank)

    def check_counts(self, counts: Array, rows: QueryRows) -> str | None:
        """What is wrong with the keys that rows saw; None: nothing."""
        return counted.wrong(counts, rows, self.keys.n, may_overflow=self.may_overflow)

    def confirm(self, trouble: str | None) -> None:
        """Tells the others whether all is well, and raises where it is not, on every rank."""
        refusal = None if trouble is None else _counts_error(f"{trouble}, on rank {self.wire.rank}")
        agree(self.wire, f"the check of call {self.number}", {}, {}, refusal, "keys seen")

    def complain(self, trouble: str) -> None:
        """The same where every rank knows already."""
        raise _counts_error(trouble)


def _counts_error(trouble: str) -> LevelheadRuntimeError:
    wanted = "every row to see the keys that the options leave it"
    advice = "Make sure that every rank was given its own shard; then this is a bug of levelhead"
    return LevelheadRuntimeError(expected("keys seen", wanted, trouble, advice))


@dataclass(frozen=True, slots=True)
class Asked:
    """What the caller of one rank passed, checked as far as that can be done alone."""

    q: Tensor  # (..., H, T, D), here and below
    k: Tensor
    v: Tensor
    options: Mapping[str, Any]
    shape: scoring.Shape
    origin: Origin
    core: Mapping[str, Any]  # the core's keywords, but for key_lengths and query_start
    ids: tuple[Array, Array] | None  # of this rank's queries and keys
    splits: tuple[Split | Runs | None, Split | Runs | None]
    threads: Any


def ask(q: Tensor, k: Tensor, v: Tensor, plan: Any, split: Any, threads: Any, options: Mapping[str, Any]) -> Asked:
    """Checks what can be checked on one rank; every refusal names its argument."""
    if plan not in PLANS:
        advice = "all-gather is for training, ring saves memory, decode is for few queries"
        raise LevelheadValueError(expected("plan", f"one of {PLANS}", repr(plan), advice))
    with torch.no_grad():
        *views, origin = arrays.take(q, k, v)
        shape = scoring.shape_of(*(tuple(x.shape) for x in views))
        ids = None if options["segments"] is None else segment_pair(options["segments"], shape)
        columns = 1 if options["mask"] is None else np.shape(options["mask"])[-1]
        alone = dict.fromkeys(("segments", "key_lengths", "query_start"))
        whole = replace(shape, S=columns if columns > 1 else shape.S)
        core = options_for_core(whole, origin, **{**options, **alone})
        team_for(threads, origin)
    return Asked(q, k, v, options, shape, origin, core, ids, _splits(split), threads)


def _splits(split: Any) -> tuple[Split | Runs | None, Split | Runs | None]:
    """What is said about queries and about keys: one for both, or a pair."""
    if split is None or isinstance(split, Split):
        return split, split
    if isinstance(split, tuple) and len(split) == 2:
        first, second = (x if x is None or isinstance(x, Split) else rising(x) for x in split)
        return first, second
    if isinstance(split, list):
        own = rising(split)
        return own, own
    what = "a Split, this rank's runs as a list, or a pair of these for queries and keys"
    advice = "Split.balanced(n, world) makes one"
    raise LevelheadTypeError(expected("split", what, type(split).__name__, advice))


# ---- together


def settle(wire: Wire, kind: str, plan: Any, asked: Asked | None, refusal: LevelheadError | None, verify: bool) -> Call:
    """What all ranks agree on; an error on every rank where they do not."""
    count = next_call(wire)
    same, own = ({}, {}) if asked is None else _said(asked, plan, verify)
    step = f"call {count} of this group, levelhead.distributed.{kind}"
    if refusal is not None or asked is None:
        agree(wire, step, same, own, refusal)
        raise AssertionError("a refusal is raised by `agree`")
    table = agree(wire, step, same, own)
    keys = _split(wire, table, "keys", asked.splits[1])
    if plan == "decode":
        queries = Split((((0, asked.shape.T, 1),),))
    else:
        queries = _split(wire, table, "queries", asked.splits[0])
    return _call(wire, plan, count, asked, table, queries, keys, verify)


def _said(asked: Asked, plan: str, verify: bool) -> tuple[dict[str, int], dict[str, int]]:
    """What this rank tells the others: what must be the same, and what is its own."""
    shape, options, core = asked.shape, asked.options, asked.core
    tensors = (asked.q, asked.k, asked.v, *(options[x] for x in ("scale", "mask", "sinks")))
    learns = torch.is_grad_enabled()
    mask = options["mask"]
    same = {
        "plan": mark(plan),
        "dtype": mark(asked.origin.dtype),
        "batch": mark(shape.batch, len(asked.q.shape)),
        "heads of q": shape.H,
        "heads of k": shape.G,
        "width of keys": shape.D,
        "width of values": shape.E or 0,
        "requires_grad": mark([learns and _learns(x) for x in tensors]),
        "verify": int(verify),
        "mask": mark(None if mask is None else (str(mask.dtype), *_without_rows(mask))),
        "segments": int(asked.ids is not None),
        "split": mark([_kind(x) for x in asked.splits]),
        "seed": mark(options["seed"]),
    }
    for name in ("scale", "cosine", "log_n", "causal", "softcap", "sinks", "alibi", "dropout"):
        same[name] = _option(core.get(name))
    same["window"] = mark(core.get("left"), core.get("right"))
    for name in ("key_lengths", "query_start"):
        same[name] = _option(arrays.option(name, options[name]))
    if plan == "decode":
        same["queries"] = shape.T
    runs = [len(x) if isinstance(x, tuple) else 0 for x in asked.splits]
    seed = int(np.uint64(core.get("seed", 0)).astype(np.int64))
    largest = [bits(_largest(x)) for x in (asked.q, asked.k)]
    own = {"drawn": seed, "T": shape.T, "S": shape.S, "query runs": runs[0], "key runs": runs[1]}
    return same, own | dict(zip(("largest q", "largest k"), largest, strict=True))


def _learns(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _without_rows(mask: Any) -> tuple[int, ...]:
    sizes = list(mask.shape)
    if len(sizes) > 1:
        sizes[-2] = -1
    return tuple(sizes)


def _kind(split: Split | Runs | None) -> Any:
    return split.fingerprint if isinstance(split, Split) else None if split is None else "own runs"


def _option(value: Any) -> int:
    """0: absent. Arrays by their bits, so that a NaN equals itself."""
    if value is None:
        return 0
    if isinstance(value, np.ndarray):
        return mark(value.shape, value.astype(value.dtype).tobytes())
    return mark(value)


def _largest(x: Tensor) -> float:
    """The largest magnitude, NaN if there is one; 0 of nothing. Makes no copy."""
    if not x.numel():
        return 0.0
    low, high = (float(end) for end in torch.aminmax(x.detach()))
    return max(-low, high) if low == low else low


def _split(wire: Wire, table: Table, of: str, said: Split | Runs | None) -> Split:
    """The split of the queries or of the keys, held against the shards that ranks have."""
    column = {"queries": "T", "keys": "S"}[of]
    lengths = tuple(row[column] for row in table)
    if said is None:
        return Split.lengths_in_order(lengths)
    if isinstance(said, Split):
        split = said
    else:
        counts = [row["query runs" if of == "queries" else "key runs"] for row in table]
        room = torch.zeros((max(counts), 3), dtype=torch.int64)
        if said:
            room[: len(said)] = torch.tensor(said)
        every = wire.gather(room, f"the runs of {of}") if max(counts) else []
        pairs = zip(every, counts, strict=True) if every else ((room, 0) for _ in counts)
        split = Split(tuple(tuple(map(tuple, x[:n].tolist())) for x, n in pairs))
    if split.world != wire.world:
        what, advice = f"{wire.world} shards, one for each rank", "Make it for this group"
        raise LevelheadValueError(expected("split", what, f"{split.world}", advice))
    for rank, (given, wanted) in enumerate(zip(lengths, split.lengths, strict=True)):
        if given != wanted:
            what = f"{wanted} {of} on rank {rank}, as the split says"
            advice = "Give every rank its own shard: split.shard(x, rank)"
            raise LevelheadValueError(expected("split", what, given, advice))
    return split


def _call(
    wire: Wire, plan: str, count: int, asked: Asked, table: Table, queries: Split, keys: Split, verify: bool
) -> Call:
    """The call with its options checked against the whole sequence: the same on every rank."""
    whole = replace(asked.shape, S=keys.n)
    given = {**asked.options, "segments": None}
    if given["dropout"] and given["seed"] is None:
        given["seed"] = table[0]["drawn"] % 2**64
    if given["query_start"] is None:
        given["query_start"] = keys.n - queries.n
    with torch.no_grad():
        core = options_for_core(whole, asked.origin, **given)
    rank = 0 if plan == "decode" else wire.rank
    options = {name: core[name] for name in _SHARED & core.keys()}
    options |= team_for(asked.threads, asked.origin)
    query_ids = key_ids = None
    if asked.ids is not None:
        query_ids = np.ascontiguousarray(asked.ids[0])
        key_ids = gathered_ids(wire, keys, asked.ids[1])
    sinks, scale = (_tensor(asked.options[x], core.get(x)) for x in ("sinks", "scale"))
    mask = None if given["mask"] is None else torch.as_tensor(given["mask"])
    assert scale is not None
    rows = QueryRows(
        asked.q,
        queries.runs[rank],
        scale.to(torch.float64).expand(asked.shape.H),
        options,
        mask,
        sinks,
        query_ids,
        key_ids,
    )
    overflows = _overflows(table, asked, core)
    return Call(wire, plan, count, queries, keys, rows, asked.origin, overflows, verify)


def gathered_ids(wire: Wire, split: Split, ids: Array) -> Array:
    """The segments of all tokens, (B, n), by position, from every rank's own."""
    room = torch.zeros((len(ids), max(split.lengths)), dtype=torch.int64)
    room[:, : ids.shape[1]] = torch.from_numpy(np.array(ids))
    whole = torch.empty((len(ids), split.n), dtype=torch.int64)
    for rank, part in enumerate(wire.gather(room, "segments")):
        split.place(whole, rank, part[:, : split.lengths[rank]], -1)
    return whole.numpy()


def _tensor(given: Any, described: Any) -> Tensor | None:
    """An option as a tensor: the caller's own, which may learn, or what was made of it."""
    if described is None or isinstance(given, Tensor):
        return given if described is not None else None
    return torch.from_numpy(np.array(described))


def _overflows(table: Table, asked: Asked, core: Mapping[str, Any]) -> bool:
    """Whether the largest q and k that any rank has could make a logit of -inf."""
    largest = [max((number(row[name]) for row in table), key=_rank_of) for name in _LARGEST]
    factor = float(np.abs(core["scale"]).max(initial=0.0)) * math.log(2 + len(table) * 2**40)
    reach = largest[0] * largest[1] * max(asked.shape.D, 1) * max(factor, 1.0)
    return not reach < _MOST


_LARGEST = ("largest q", "largest k")
_MOST = float(np.finfo(np.float32).max) / 2**8


def _rank_of(x: float) -> float:
    return math.inf if math.isnan(x) else x
