"""The layout of a partial attention state: what each column means, and the identity.

A state holds, for every query row, the sums over the keys processed so far. States are merged in the core and in
`reference.merge`; this file only names their parts and computes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

# Columns of `sums`, over the visible logits s of a row, in units of ln 2: the kernel computes 2^x,
# which is cheaper than exp(x), and two readings of the same maximum must not differ by rounding.
MAX = 0  # m, the running maximum; -inf: nothing seen
L = 1  # sum of 2^(s - m)
H = 2  # sum of 2^(s - m)·(s - m), the entropy's numerator
E2 = 3  # sum of 4^(s - m), the numerator of Σp²
MEAN = 4  # mean of s; 0 when nothing was seen
M2 = 5  # sum of (s - mean)²
MIN = 6  # smallest s; +inf: nothing seen
FIRST = 7  # s of the first key of the row's document; -inf: hidden, or not among these keys
SUMS = ("max", "l", "h", "e2", "mean", "m2", "min", "first")

LN2 = math.log(2)
NATURAL = (LN2, 1.0, LN2, 1.0, LN2, LN2**2, LN2, LN2)  # each column times this: natural logits

# Columns of `counts`:
COUNT = 0  # visible keys: those with s > -inf, or NaN
ARGMAX = 1  # position of the first maximum; -1: nothing seen, or a NaN among the visible
COUNTS = ("count", "argmax")
_COUNT_BYTES = np.dtype(np.int64).itemsize


@dataclass(frozen=True, slots=True)
class State:
    """A partial state of every query row.

    A row with a visible NaN has NaN in every sum but `first`, and argmax -1. Sinks are in none of the columns: they
    are added when a result is computed, so that a merge cannot count them twice.
    """

    sums: NDArray[Any]  # (..., H, T, 8), float32 or float64
    counts: NDArray[np.int64]  # (..., H, T, 2)
    acc: NDArray[Any] | None  # (..., H, T, E): sum of 2^(s - m)·v; None: statistics only
    keys: int  # key positions covered: how far the positions of a later state are shifted
    # The first key of each row's document, broadcastable to (..., H, T); -1: not among these keys. None: position 0.
    first_keys: NDArray[np.int64] | None = None


def first_of(a: State, b: State, shift: int, xp: Any = np) -> tuple[NDArray[Any], NDArray[np.int64] | None]:
    """The column `first` of a's keys followed by b's, `shift` positions later, and the `first_keys` of both."""
    ours, theirs = a.sums[..., FIRST], b.sums[..., FIRST]
    if a.first_keys is None and b.first_keys is None:
        return (ours if shift > 0 else xp.maximum(ours, theirs)), None
    at_a, at_b = (-1 if x.keys == 0 else 0 if x.first_keys is None else x.first_keys for x in (a, b))
    at_a, at_b = xp.broadcast_arrays(at_a, at_b)
    at = xp.where(at_a >= 0, at_a, xp.where(at_b >= 0, at_b + shift, -1))
    return xp.where(at_a >= 0, ours, theirs), at


def unwritten(
    lead: tuple[int, ...], E: int | None, dtype: DTypeLike, keys: int, first_keys: NDArray[np.int64] | None = None
) -> State:
    """Memory for rows of shape `lead` = (..., H, T), for the core to write; `first_keys` (B, T) are kept.

    One block of memory: an allocator that returns large blocks to the system keeps one of a size that it has freed
    before, whereas three would be mapped again, page by page, at every call.
    """
    real, rows = np.dtype(dtype), math.prod(lead)
    first = rows * len(COUNTS) * _COUNT_BYTES
    second = first + rows * len(SUMS) * real.itemsize
    block = np.empty(second + rows * (E or 0) * real.itemsize, np.uint8)
    counts = block[:first].view(np.int64).reshape(*lead, len(COUNTS))
    sums = block[first:second].view(real).reshape(*lead, len(SUMS))
    acc = None if E is None else block[second:].view(real).reshape(*lead, E)
    if first_keys is not None:  # the same for all heads
        first_keys = first_keys.reshape((*lead[:-2], 1, lead[-1])[-len(lead) :])
    return State(sums, counts, acc, keys, first_keys)


def identity(lead: tuple[int, ...], E: int | None, dtype: DTypeLike = np.float64) -> State:
    """Nothing seen, for rows of shape `lead` = (..., H, T)."""
    sums = np.full((*lead, len(SUMS)), (-np.inf, 0.0, 0.0, 0.0, 0.0, 0.0, np.inf, -np.inf), dtype)
    counts = np.full((*lead, len(COUNTS)), (0, -1), np.int64)
    return State(sums, counts, None if E is None else np.zeros((*lead, E), dtype), keys=0)
