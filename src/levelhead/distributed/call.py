"""A distributed call: the arguments on this rank, and what all ranks agreed on.

Arguments are checked twice, by the code that checks `levelhead.attention`: first alone, so that a mistake on one rank
is known before any message; then, when the length of the whole sequence is known, together. This file computes nothing
and decides no order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from levelhead.call import arrays
from levelhead.call.arrays import Array, Origin
from levelhead.call.options import (
    BATCH,
    DEFAULTS,
    FLAG,
    HEADS,
    NAMES,
    NUMBER,
    RATE,
    TOKENS,
    Options,
    Scoring,
    Shape,
    fields,
    shape_of,
)
from levelhead.call.prepare import described, for_core, team_for
from levelhead.call.segments import segment_pair
from levelhead.distributed import counted
from levelhead.distributed.agree import Table, agree, bits, mark, next_call, number
from levelhead.distributed.local import QueryRows
from levelhead.distributed.split import Runs, Split, rising
from levelhead.distributed.wire import Wire
from levelhead.errors import LevelheadError, LevelheadTypeError, LevelheadValueError, expected
from levelhead.torch.operators import LevelheadRuntimeError

PLANS = ("all-gather", "ring", "decode", "ulysses")

SplitLike: TypeAlias = Split | list[tuple[int, int, int]] | tuple[Any, Any] | None

# Fields that each kernel call takes from the rows and keys at hand; all calls share the others.
_OWN = {"scale", "mask", "sinks", *fields(TOKENS)}
# Options whose sizes are those of the whole sequence.
_WHOLE = ("segments", *(name for name in fields(BATCH) if name in NAMES))


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks agreed on, and this rank's rows."""

    wire: Wire
    plan: str
    number: int  # of the group's calls
    queries: Split  # in plan "decode" every rank has all of them: one shard
    keys: Split
    rows: QueryRows
    origin: Origin
    may_overflow: bool  # whether a logit may become -inf and count as hidden
    verify: bool
    exists: Array | None  # of this rank's rows, broadcastable to (..., H, T); None: all

    @property
    def positions(self) -> Array:
        """Where this rank's rows sit in the sequence of queries."""
        return self.queries.positions(0 if self.plan == "decode" else self.wire.rank)

    def check_counts(self, counts: Array, rows: QueryRows) -> str | None:
        """What is wrong with the numbers of keys that rows saw; None: nothing."""
        return counted.wrong(counts, rows, self.keys.n, may_overflow=self.may_overflow)

    def confirm(self, trouble: str | None) -> None:
        """Exchanges whether the check passed, and raises on every rank where it failed on one."""
        refusal = None if trouble is None else _counts_error(f"{trouble}, on rank {self.wire.rank}")
        agree(self.wire, f"the check of call {self.number}", {}, {}, refusal, "keys seen")

    def complain(self, trouble: str) -> None:
        """The same where every rank has found it."""
        raise _counts_error(trouble)


def _counts_error(trouble: str) -> LevelheadRuntimeError:
    wanted = "every row to see the keys that the options leave it"
    advice = "Make sure that every rank was given its own shard; then this is a bug of levelhead"
    return LevelheadRuntimeError(expected("keys seen", wanted, trouble, advice))


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a call on this rank, unchecked."""

    q: Any
    k: Any
    v: Any
    plan: Any
    split: Any
    threads: Any
    options: Options


@dataclass(frozen=True, slots=True)
class Checked:
    """The same, checked as far as one rank can alone."""

    q: Tensor  # (..., H, T, D), here and below
    k: Tensor
    v: Tensor
    options: Mapping[str, Any]  # every one of them
    shape: Shape
    origin: Origin
    scoring: Scoring  # without `_WHOLE`
    ids: tuple[Array, Array] | None  # of this rank's queries and keys
    splits: tuple[Split | Runs | None, Split | Runs | None]
    threads: Any


def check(arguments: Arguments) -> Checked:
    """Checks what can be checked on one rank; every refusal names its argument."""
    q, k, v, plan = arguments.q, arguments.k, arguments.v, arguments.plan
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            advice = "Convert it with torch.from_numpy"
            raise LevelheadTypeError(expected(name, "a torch tensor", type(x).__name__, advice))
    if q.dim() == k.dim() == v.dim() == 2:  # one head without its axis
        q, k, v = q[None], k[None], v[None]
    if plan not in PLANS:
        advice = "all-gather is for training, ring saves memory, decode is for few queries"
        raise LevelheadValueError(expected("plan", f"one of {PLANS}", repr(plan), advice))
    options = {**DEFAULTS, **arguments.options}
    with torch.no_grad():
        *views, origin = arrays.take(q, k, v)
        shape = shape_of(*(tuple(x.shape) for x in views))
        ids = None if options["segments"] is None else segment_pair(options["segments"], shape)
        columns = 1 if options["mask"] is None else np.shape(options["mask"])[-1]
        whole = replace(shape, S=columns if columns > 1 else shape.S)
        scoring = described(whole, origin, {**options, **dict.fromkeys(_WHOLE)})
        team_for(arguments.threads, origin)
    return Checked(q, k, v, options, shape, origin, scoring, ids, _splits(arguments.split), arguments.threads)


def _splits(split: Any) -> tuple[Split | Runs | None, Split | Runs | None]:
    """The splits of queries and of keys: one for both, or a pair."""
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


def agreed(
    wire: Wire, kind: str, plan: Any, checked: Checked | None, refusal: LevelheadError | None, verify: bool
) -> Agreement:
    """What all ranks agree on; an error on every rank where they do not."""
    count = next_call(wire)
    same, own = ({}, {}) if checked is None else _message(checked, plan, verify)
    step = f"call {count} of this group, levelhead.distributed.{kind}"
    if refusal is not None or checked is None:
        agree(wire, step, same, own, refusal)
        raise AssertionError("a refusal is raised by `agree`")
    table = agree(wire, step, same, own)
    keys = _split(wire, table, "keys", checked.splits[1])
    if plan == "decode":
        queries = Split((((0, checked.shape.T, 1),),))
    else:
        queries = _split(wire, table, "queries", checked.splits[0])
    return _agreement(wire, plan, count, checked, table, queries, keys, verify)


def _message(checked: Checked, plan: str, verify: bool) -> tuple[dict[str, int], dict[str, int]]:
    """What this rank sends to the others: what must be the same, and what is its own."""
    shape, options, scoring = checked.shape, checked.options, checked.scoring
    tensors = (checked.q, checked.k, checked.v, *(options[x] for x in ("scale", "mask", "sinks")))
    enabled = torch.is_grad_enabled()
    mask = options["mask"]
    same = {
        "plan": mark(plan),
        "dtype": mark(checked.origin.dtype),
        "batch": mark(shape.batch, len(checked.q.shape)),
        "heads of q": shape.H,
        "heads of k": shape.G,
        "width of keys": shape.D,
        "width of values": shape.E or 0,
        "requires_grad": mark([enabled and _requires_grad(x) for x in tensors]),
        "verify": int(verify),
        "mask": mark(None if mask is None else (str(mask.dtype), *_without_rows(mask))),
        "segments": int(checked.ids is not None),
        "split": mark([_kind(x) for x in checked.splits]),
        "seed": mark(options["seed"]),
        "window": mark(scoring.left, scoring.right),
    }
    same |= {name: _option(getattr(scoring, name)) for name in fields(HEADS, FLAG, NUMBER, RATE)}
    same |= {name: _option(arrays.option(name, options[name])) for name in _WHOLE if name != "segments"}
    if plan == "decode":
        same["queries"] = shape.T
    runs = [len(x) if isinstance(x, tuple) else 0 for x in checked.splits]
    seed = int(np.uint64(scoring.seed).astype(np.int64))
    largest = [bits(_largest(x)) for x in (checked.q, checked.k)]
    own = {"drawn": seed, "T": shape.T, "S": shape.S, "query runs": runs[0], "key runs": runs[1]}
    return same, own | dict(zip(("largest q", "largest k"), largest, strict=True))


def _requires_grad(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _without_rows(mask: Any) -> tuple[int, ...]:
    sizes = list(mask.shape)
    if len(sizes) > 1:
        sizes[-2] = -1
    return tuple(sizes)


def _kind(split: Split | Runs | None) -> Any:
    return split.fingerprint if isinstance(split, Split) else None if split is None else "own runs"


def _option(value: Any) -> int:
    """0: absent or off. Arrays by their bits, so that a NaN equals itself."""
    if value is None or value is False:
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


def _agreement(
    wire: Wire, plan: str, count: int, checked: Checked, table: Table, queries: Split, keys: Split, verify: bool
) -> Agreement:
    """The call with its options checked against the whole sequence: the same on every rank."""
    shape = replace(checked.shape, S=keys.n)
    options = {**checked.options, "segments": None}
    if options["dropout"] and options["seed"] is None:
        options["seed"] = table[0]["drawn"] % 2**64
    if options["query_start"] is None:
        options["query_start"] = keys.n - queries.n
    with torch.no_grad():
        scoring = described(shape, checked.origin, options, queries=queries.n)
    keywords = for_core(scoring, shape)
    rank = 0 if plan == "decode" else wire.rank
    shared = {name: x for name, x in keywords.items() if name not in _OWN}
    query_ids = key_ids = None
    if checked.ids is not None:
        query_ids = np.ascontiguousarray(checked.ids[0])
        key_ids = gathered_ids(wire, keys, checked.ids[1])
    sinks, scale = (_tensor(checked.options[x], keywords.get(x)) for x in ("sinks", "scale"))
    assert scale is not None
    rows = QueryRows(
        checked.q,
        queries.runs[rank],
        scale.to(torch.float64).expand(checked.shape.H),
        shared | team_for(checked.threads, checked.origin),
        None if options["mask"] is None else torch.as_tensor(options["mask"]),
        sinks,
        query_ids,
        key_ids,
    )
    may_overflow = _overflows(table, checked)
    exists = scoring.existing_rows(shape, queries.positions(rank))
    return Agreement(wire, plan, count, queries, keys, rows, checked.origin, may_overflow, verify, exists)


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


def _overflows(table: Table, checked: Checked) -> bool:
    """Whether the largest q and k that any rank has could make a logit of -inf."""
    largest = [max((number(row[name]) for row in table), key=_rank_of) for name in _LARGEST]
    factor = float(np.abs(checked.scoring.scale).max(initial=0.0)) * math.log(2 + len(table) * 2**40)
    reach = largest[0] * largest[1] * max(checked.shape.D, 1) * max(factor, 1.0)
    return not reach < _MOST


_LARGEST = ("largest q", "largest k")
_MOST = float(np.finfo(np.float32).max) / 2**8


def _rank_of(x: float) -> float:
    return math.inf if math.isnan(x) else x
