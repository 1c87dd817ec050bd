"""A distributed call: the arguments on this rank, and what all ranks agreed on.

Arguments are checked twice, by the code that checks `levelhead.attention`: first alone, so that a mistake on one rank
is known before any message; then, when the length of the whole sequence is known, together. This file computes nothing
and decides no order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from levelhead import state
from levelhead.call import arrays, options
from levelhead.call.arrays import Array, Origin
from levelhead.call.options import DEFAULTS, Options, Scoring, Shape, fields, shape_of
from levelhead.call.prepare import described, for_core, team_for
from levelhead.call.segments import segment_pair
from levelhead.checks import integers
from levelhead.distributed import counted
from levelhead.distributed.agree import Table, agree, bits, mark, next_call, number
from levelhead.distributed.local import QueryRows
from levelhead.distributed.split import Runs, Split, rising
from levelhead.distributed.trace import Trace
from levelhead.distributed.whole import gathered_shards
from levelhead.distributed.wire import Wire
from levelhead.errors import LevelheadError, bad_type, bad_value, expected
from levelhead.state import State
from levelhead.torch.operators import LevelheadRuntimeError

PLANS = ("all-gather", "ring", "decode", "ulysses")

SplitLike: TypeAlias = Split | list[tuple[int, int, int]] | tuple[Any, Any] | None

# Fields that each kernel call takes from the rows and keys at hand; all calls share the others.
_OWN = {"scale", "mask", "sinks", *fields(options.TOKENS)}
# Options whose sizes are those of the whole sequence.
_WHOLE = ("segments", *(name for name in fields(options.BATCH) if name in options.NAMES))
_MOST = float(np.finfo(np.float32).max) / 2**8  # of a logit that certainly does not overflow


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

    def verify_counts(self, states: State, rows: QueryRows) -> None:
        """If the call is verified: an error on every rank where rows of one rank did not see the right keys."""
        if not self.verify:
            return
        shared = self.plan == "decode"  # every rank has the same rows: each finds the error by itself
        counts = states.counts[..., state.COUNT]
        trouble = counted.wrong(counts, rows, self.keys.n, may_overflow=self.may_overflow)
        refusal: LevelheadRuntimeError | None = None
        if trouble is not None:
            where = "" if shared else f", on rank {self.wire.rank}"
            wanted = "every row to see the keys that the options leave it"
            advice = "Make sure that every rank was given its own shard; then this is a bug of levelhead"
            refusal = LevelheadRuntimeError(expected("keys seen", wanted, f"{trouble}{where}", advice))
        if not shared:
            agree(self.wire, f"the check of call {self.number}", {}, {}, refusal, "keys seen")
        elif refusal is not None:
            raise refusal


class Spread(NamedTuple):
    """How a call is spread over the ranks, as passed to `attention`."""

    group: Any = None
    plan: str = "all-gather"
    split: SplitLike = None
    threads: int | None = None
    timeout: Any = None
    verify: bool = True
    trace: Trace | None = None


@dataclass(frozen=True, slots=True)
class Checked:
    """The arguments of a call on this rank, checked as far as one rank can alone."""

    q: Tensor  # (..., H, T, D), here and below
    k: Tensor
    v: Tensor
    spread: Spread
    options: Mapping[str, Any]  # every one of them
    shape: Shape
    origin: Origin
    scoring: Scoring  # without `_WHOLE`
    ids: tuple[Array, Array] | None  # of this rank's queries and keys
    splits: tuple[Split | Runs | None, Split | Runs | None]  # of queries and keys


def check(q: Any, k: Any, v: Any, passed: Options, spread: Spread, world: int) -> Checked:
    """Checks what can be checked on one rank; every refusal names its argument."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise bad_type(name, "a torch tensor", type(x).__name__, "Convert it with torch.from_numpy")
    if q.dim() == k.dim() == v.dim() == 2:  # one head without its axis
        q, k, v = q[None], k[None], v[None]
    plan = spread.plan
    if plan not in PLANS:
        advice = "all-gather is for training, ring saves memory, decode is for few queries"
        raise bad_value("plan", f"one of {PLANS}", repr(plan), advice)
    given = {**DEFAULTS, **passed}
    with torch.no_grad():
        *views, origin = arrays.take(q, k, v)
        shape = shape_of(*(tuple(x.shape) for x in views))
        for name in fields(options.BATCH):  # ranks compare them in their normal form
            if given[name] is not None:
                value, advice = arrays.option(name, given[name]), "Give one, or one per batch row"
                given[name] = integers(name, value, shape.batch or (1,), "integers", advice)
        ids = None if given["segments"] is None else segment_pair(given["segments"], shape)
        columns = 1 if given["mask"] is None else np.shape(given["mask"])[-1]
        whole = replace(shape, S=columns if columns > 1 else shape.S)
        scoring = described(whole, origin, {**given, **dict.fromkeys(_WHOLE)})
        team_for(spread.threads, origin)
    splits = _splits(spread.split)
    for name, heads in (("q", shape.H), ("k", shape.G)):
        if plan == "ulysses" and heads % world:
            wanted = f"heads that divide by the {world} ranks in plan 'ulysses'"
            raise bad_value(name, wanted, f"{heads} heads", 'Use plan="all-gather" or "ring", or fewer ranks')
    return Checked(q, k, v, spread, given, shape, origin, scoring, ids, splits)


def _splits(split: Any) -> tuple[Split | Runs | None, Split | Runs | None]:
    """The splits of queries and of keys: one for both, or a pair."""
    if not (split is None or isinstance(split, Split | list) or (isinstance(split, tuple) and len(split) == 2)):
        wanted = "a Split, this rank's runs as a list, or a pair of these for queries and keys"
        raise bad_type("split", wanted, type(split).__name__, "Split.balanced(n, world) makes one")
    pair = split if isinstance(split, tuple) else (split, split)
    queries, keys = (x if x is None or isinstance(x, Split) else rising(x) for x in pair)
    return queries, keys


# ---- together


def agreed(wire: Wire, kind: str, check_own: Callable[[], Checked]) -> tuple[Checked, Agreement]:
    """The arguments of this rank, and what all ranks agree on; an error on every rank where one of them refuses its
    arguments or where they do not agree."""
    try:
        checked, refusal = check_own(), None
    except LevelheadError as error:
        checked, refusal = None, error
    count = next_call(wire)
    same, own = ({}, {}) if checked is None else _message(checked)
    table = agree(wire, f"call {count} of this group, levelhead.distributed.{kind}", same, own, refusal)
    assert checked is not None  # `agree` raises a refusal
    keys = _split(wire, table, "keys", checked.splits[1])
    if checked.spread.plan == "decode":
        queries = Split((((0, checked.shape.T, 1),),))
    else:
        queries = _split(wire, table, "queries", checked.splits[0])
    return checked, _agreement(wire, count, checked, table, queries, keys)


def _message(checked: Checked) -> tuple[dict[str, int], dict[str, int]]:
    """What this rank sends to the others: what must be the same, and what is its own."""
    shape, given, scoring, splits = checked.shape, checked.options, checked.scoring, checked.splits
    tensors = (checked.q, checked.k, checked.v, *(given[x] for x in ("scale", "mask", "sinks")))
    enabled = torch.is_grad_enabled()
    mask = given["mask"]
    dtype = str(getattr(mask, "dtype", None)).removeprefix("torch.")
    same = {
        "plan": mark(checked.spread.plan),
        "dtype": mark(checked.origin.dtype),
        "batch": mark(shape.batch, len(checked.q.shape)),
        "heads of q": shape.H,
        "heads of k": shape.G,
        "width of keys": shape.D,
        "width of values": shape.E or 0,
        "requires_grad": mark([enabled and isinstance(x, Tensor) and x.requires_grad for x in tensors]),
        "verify": int(checked.spread.verify),
        # a mask without its number of rows, which differs between ranks
        "mask": mark(None if mask is None else (dtype, len(mask.shape), *mask.shape[:-2], *mask.shape[-1:])),
        "segments": int(checked.ids is not None),
        "split": mark([x.fingerprint if isinstance(x, Split) else x is not None for x in splits]),
        "seed": mark(None if given["seed"] is None else scoring.seed),
        "window": mark(scoring.left, scoring.right),
    }
    kinds = (options.HEADS, options.FLAG, options.NUMBER, options.RATE)
    same |= {name: _option(getattr(scoring, name)) for name in fields(*kinds)}
    same |= {name: _option(given[name]) for name in fields(options.BATCH)}
    if checked.spread.plan == "decode":
        same["queries"] = shape.T
    runs = [len(x) if isinstance(x, tuple) else 0 for x in splits]
    own = {
        "drawn": int(np.uint64(scoring.seed).astype(np.int64)),
        "tokens of queries": shape.T,
        "tokens of keys": shape.S,
        "runs of queries": runs[0],
        "runs of keys": runs[1],
        "largest q": bits(_largest(checked.q)),
        "largest k": bits(_largest(checked.k)),
    }
    return same, own


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


def _split(wire: Wire, table: Table, of: str, passed: Split | Runs | None) -> Split:
    """The split of the queries or of the keys, compared with the lengths of the ranks' shards."""
    lengths = tuple(row[f"tokens of {of}"] for row in table)
    if passed is None:
        return Split.lengths_in_order(lengths)
    split = passed if isinstance(passed, Split) else _gathered_runs(wire, table, of, passed)
    if split.world != wire.world:
        wanted = f"{wire.world} shards, one for each rank"
        raise bad_value("split", wanted, f"{split.world}", "Make it for this group")
    for rank, (length, wanted_length) in enumerate(zip(lengths, split.lengths, strict=True)):
        if length != wanted_length:
            wanted = f"{wanted_length} {of} on rank {rank}, as the split says"
            raise bad_value("split", wanted, length, "Give every rank its own shard: split.shard(x, rank)")
    return split


def _gathered_runs(wire: Wire, table: Table, of: str, own: Runs) -> Split:
    """The split, from every rank's own runs."""
    counts = [row[f"runs of {of}"] for row in table]
    padded = torch.zeros((max(counts), 3), dtype=torch.int64)
    if own:
        padded[: len(own)] = torch.tensor(own)
    every = wire.gather(padded, f"the runs of {of}") if max(counts) else [padded] * wire.world
    return Split(tuple(tuple(map(tuple, x[:n].tolist())) for x, n in zip(every, counts, strict=True)))


def _agreement(wire: Wire, count: int, checked: Checked, table: Table, queries: Split, keys: Split) -> Agreement:
    """The call with its options checked against the whole sequence: the same on every rank."""
    shape = replace(checked.shape, S=keys.n)
    plan, verify = checked.spread.plan, checked.spread.verify
    given = {**checked.options, "segments": None}
    if given["dropout"] and given["seed"] is None:
        given["seed"] = table[0]["drawn"] % 2**64
    if given["query_start"] is None:
        given["query_start"] = keys.n - queries.n
    with torch.no_grad():
        scoring = described(shape, checked.origin, given, queries=queries.n)
    keywords = for_core(scoring, shape)
    rank = 0 if plan == "decode" else wire.rank
    shared = {name: x for name, x in keywords.items() if name not in _OWN}
    own = checked.ids
    ids = None if own is None else (np.ascontiguousarray(own[0]), gathered_ids(wire, keys, own[1]))
    sinks, scale = (_tensor(given[x], keywords.get(x)) for x in ("sinks", "scale"))
    assert scale is not None
    rows = QueryRows(
        checked.q,
        queries.runs[rank],
        scale.to(torch.float64).expand(checked.shape.H),
        shared | team_for(checked.spread.threads, checked.origin),
        None if given["mask"] is None else torch.as_tensor(given["mask"]),
        sinks,
        ids,
    )
    exists = scoring.existing_rows(shape, queries.positions(rank))
    may_overflow = _may_overflow(table, checked)
    return Agreement(wire, plan, count, queries, keys, rows, checked.origin, may_overflow, verify, exists)


def gathered_ids(wire: Wire, split: Split, ids: Array) -> Array:
    """The segments of all tokens, (B, n), by position, from every rank's own."""
    return gathered_shards(wire, torch.tensor(ids, dtype=torch.int64), split, -1, "segments").numpy()


def _tensor(given: Any, described: Any) -> Tensor | None:
    """An option as a tensor: the caller's own, which may learn, or what was made of it."""
    if described is None or isinstance(given, Tensor):
        return None if described is None else given
    return torch.from_numpy(np.array(described))


def _may_overflow(table: Table, checked: Checked) -> bool:
    """Whether the largest q and k that any rank has could make a logit of -inf; NaN could."""
    q, k = (float(np.max([number(row[name]) for row in table])) for name in ("largest q", "largest k"))
    factor = float(np.abs(checked.scoring.scale).max(initial=0.0)) * math.log(2 + len(table) * 2**40)
    return not q * k * max(checked.shape.D, 1) * max(factor, 1.0) < _MOST
