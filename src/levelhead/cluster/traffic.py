"""Bytes that a rank receives in each plan, and the least that the plan could do with.

W ranks, n tokens, |KV| the bytes of all keys and values, `own` a rank's tokens. Received per rank:

| plan | forward | backward |
|---|---|---|
| all-gather | (W−1)/W · KV | the same again, and (W−1)/W · dKV in float32: a reduce-scatter |
| ring | (W−1)/W · KV, in W−1 steps | the same again, and (W−1)/W · dKV in float32 a step behind |
| decode | (W−1) · rows · (d+1) float32: an output and a logsumexp | (W−1) · rows · d float32 |
| ulysses | (W−1)/W² · (Q + KV + O) | (W−1)/W² · (Q + KV + dO + dQ + dKV) |

This is what is necessary when nothing but the shards is kept between the passes (`bound`). What is sent beyond it is
counted too: the all-gather fills uneven shards up to the longest, a state of decode carries ten more numbers for its
statistics, and ranks agree on every call. A test holds every byte to what `levelhead.distributed.Trace` counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from operator import add

from levelhead.cluster.problem import Problem

PLANS = ("all-gather", "ring", "ulysses", "decode")
AGREEMENT = 48 * 8  # bytes of one rank's message before and after a call
SUM = 2 * 8  # bytes of the message by which ranks compare their numbers
STATISTICS = 8 * 4 + 2 * 8  # bytes of a row's state beside its output


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one rank receives in one pass."""

    payload: float  # bytes of arrays
    bound: float  # the least bytes for the plan
    agreement: float  # bytes of small messages
    messages: int  # one after another, beside the ring's steps
    steps: int = 0  # messages of a ring, behind which computation goes on

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*map(add, astuple(self), astuple(other)))


def traffic(
    plan: str, problem: Problem, world: int, passes: str, lengths: Sequence[float] | None = None, rank: int = 0
) -> Traffic:
    """Of this rank where each has so many tokens; None: an even share."""
    lengths = lengths or [problem.tokens / world] * world
    own, longest, before = lengths[rank], max(lengths), lengths[rank - 1]
    forward = _forward(plan, problem, world, own, longest)
    if passes == "forward":
        return forward
    return forward + _backward(plan, problem, world, own, longest, before)


def _forward(plan: str, p: Problem, world: int, own: float, longest: float) -> Traffic:
    others, rest, turns = world - 1, p.tokens - own, rounds(world)
    agreed = 2 * others * AGREEMENT
    if plan == "all-gather":
        moved = others * longest * p.kv * p.size
        return Traffic(moved, rest * p.kv * p.size, agreed, 2 * turns + others)
    if plan == "ring":
        moved = rest * p.kv * p.size
        return Traffic(moved, moved, agreed, 2 * turns, others)
    if plan == "decode":
        rows = others * p.heads * p.rows
        states = rows * (4 * p.width + STATISTICS)
        agreed = others * (AGREEMENT + SUM)
        return Traffic(states, rows * (p.width + 1) * 4, agreed, 2 * turns + others)
    out = p.heads * p.width
    moved = (rest * (out + p.kv) + others * own * out) * p.size / world
    return Traffic(moved, moved, agreed, 2 * (turns + others))


def _backward(plan: str, p: Problem, world: int, own: float, longest: float, before: float) -> Traffic:
    others, rest, turns = world - 1, p.tokens - own, rounds(world)
    agreed = others * AGREEMENT
    sums = others * own * p.kv * 4  # the gradients of this rank's tokens from all other ranks
    if plan == "all-gather":
        gathered = others * longest * p.kv * p.size
        bound = rest * p.kv * p.size + sums
        return Traffic(gathered + sums, bound, agreed, turns + 2 * others)
    if plan == "ring":
        # The rank before passes on its visitors' gradients, this rank's the last; not its own.
        moved = rest * p.kv * p.size + (p.tokens - before) * p.kv * 4
        return Traffic(moved, moved, agreed, turns, 2 * others)
    if plan == "decode":
        rows = others * p.heads * p.rows * p.width * 4
        return Traffic(rows, rows, others * (AGREEMENT + SUM), 2 * turns + others)
    out = p.heads * p.width
    moved = (rest * (2 * out + p.kv) + others * own * (out + p.kv)) * p.size / world
    return Traffic(moved, moved, agreed, turns + 2 * others)


def rounds(world: int) -> int:
    """Messages one after another until every rank has data from every other."""
    return (world - 1).bit_length()
