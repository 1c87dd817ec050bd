"""Packed sequences and ALiBi: ids per token from lengths, pairs of ids, positions of runs, standard slopes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead.call.shapes import Shape
from levelhead.checks import as_array, integer, integers, short_repr
from levelhead.errors import bad_type, bad_value


def segment_ids(cu_seqlens: Any, total: int | None = None) -> NDArray[np.int64]:
    """Ids 0, 1, 2, ... per token from cumulative lengths (0, n0, n0 + n1, ...).

    Args:
        cu_seqlens: integers that start at 0 and never fall, shape (sequences + 1,).
        total: tokens in the packed array, at least the last cumulative length; the tokens past
            it get the id -1.

    >>> segment_ids([0, 2, 5], total=6).tolist()
    [0, 0, 1, 1, 1, -1]
    """
    advice = "Pass cumulative lengths, such as [0, 3, 7] for sequences of 3 and 4 tokens"
    what = "integers that start at 0 and never fall"
    shape = as_array("cu_seqlens", cu_seqlens, what, advice).shape
    if len(shape) != 1 or shape[0] == 0:
        raise bad_value("cu_seqlens", what, f"shape {shape}", advice)
    ends = integers("cu_seqlens", cu_seqlens, shape, what, advice)
    if ends[0] != 0 or (np.diff(ends) < 0).any():
        raise bad_value("cu_seqlens", what, ends.tolist(), advice)
    ids = np.repeat(np.arange(len(ends) - 1), np.diff(ends))
    if total is None:
        return ids
    what, advice = f"an integer of at least {len(ids)}", "Pass the length of the packed array"
    total = integer("total", total, what, advice, lambda n: n >= len(ids))
    return np.pad(ids, (0, total - len(ids)), constant_values=-1)


def segment_pair(segments: Any, shape: Shape) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(query ids (B, T), key ids (B, S)) from a pair, or from one array when T == S."""
    advice = "Pass a tuple (query_ids, key_ids), one integer per token"
    if isinstance(segments, tuple):
        if len(segments) != 2:
            raise bad_value("segments", "two arrays of ids", f"a tuple of {len(segments)}", advice)
        query, key = segments
    elif shape.T != shape.S:
        raise bad_value("segments", f"a pair of ids for {shape.T} queries and {shape.S} keys", "one array", advice)
    else:
        query = key = segments
    result = []
    for name, ids, length in (("query", query, shape.T), ("key", key, shape.S)):
        # A lone number would broadcast: (0, 1) would hide every key, silently.
        if isinstance(ids, int | np.integer):
            raise bad_type("segments", f"an array of {name} ids", short_repr(ids), advice)
        full = (*(shape.batch or (1,)), length)
        values = integers("segments", ids, full, f"integer {name} ids", advice)
        result.append(values.reshape(shape.B, length))
    return result[0], result[1]


def positions(runs: Iterable[tuple[int, int, int]]) -> NDArray[np.int64]:
    """Every position of runs (start, length, stride), one after another."""
    parts = [start + stride * np.arange(length) for start, length, stride in runs]
    return np.concatenate([np.zeros(0, np.int64), *parts])


def first_keys(query_ids: NDArray[np.int64], key_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first key of each query's segment, (B, T), from ids (B, T) and (B, S); -1: its segment has no key."""
    first = np.full(query_ids.shape, -1, np.int64)
    for b, ids in enumerate(key_ids):
        known, at = np.unique(ids, return_index=True)
        if len(known):
            place = np.minimum(np.searchsorted(known, query_ids[b]), len(known) - 1)
            first[b] = np.where(known[place] == query_ids[b], at[place], -1)
    return first


def alibi_slopes(heads: int) -> NDArray[np.float64]:
    """The geometric slopes of the ALiBi paper (arXiv:2108.12409), shape (H,).

    For n = 2^i heads they are 2^(-8/n), 2^(-16/n), ...; otherwise those of the next lower power of
    two, then every other one of the next higher.
    """

    def geometric(n: int) -> NDArray[np.float64]:
        return np.exp2(-8.0 * np.arange(1, n + 1) / n)

    if heads == 0:
        return np.zeros(0)
    low = 1 << (heads.bit_length() - 1)
    return np.concatenate([geometric(low), geometric(2 * low)[::2][: heads - low]])
