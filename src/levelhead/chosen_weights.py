"""Attention weights of chosen query rows, which the core never forms: what `observe(weights=)` adds.

The softmax of the logits of `reference`, some rows at a time. This file checks which rows are asked for and says what
they cost before anything is computed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead.call.arrays import Array, Origin
from levelhead.call.halves import as_bfloat16
from levelhead.call.options import Scoring, Shape
from levelhead.errors import bad_type, bad_value

LIMIT = 1 << 32  # bytes of weights in one call
_AT_A_TIME = 1 << 22  # logits that are held at a time, in float64: 32 MiB, a few times over
_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def row_indices(rows: Any, shape: Shape, dtype: str) -> NDArray[np.int64]:
    """The indices of the rows that are asked for, checked; an error above LIMIT says how much memory they take."""
    wanted = "an index, several of them, a slice, or True for all rows"
    advice = "Count rows as Python does: from 0, or from the end with negative numbers"
    if rows is True or (isinstance(rows, str) and rows == "all"):
        index = np.arange(shape.T)
    elif isinstance(rows, slice):
        index = np.arange(shape.T)[rows]
    elif isinstance(rows, bool | np.bool_ | str):
        raise bad_value("weights", wanted, repr(rows), advice)
    else:
        given = np.asarray(rows.detach().cpu() if hasattr(rows, "detach") else rows)
        if given.dtype.kind not in "iu" and given.size:
            raise bad_type("weights", wanted, f"dtype {given.dtype}" if given.dtype != object else type(rows), advice)
        if given.ndim > 1:
            raise bad_value("weights", wanted, f"shape {given.shape}", advice)
        index = given.reshape(-1).astype(np.int64)
        outside = index[(index < -shape.T) | (index >= shape.T)]
        if outside.size:
            raise bad_value("weights", f"rows of the {shape.T} queries", int(outside[0]), advice)
        index = np.where(index < 0, index + shape.T, index)
    needed = shape.B * shape.H * len(index) * shape.S * _BYTES[dtype]
    if needed > LIMIT:
        given_rows = f"{len(index)} rows of {shape.B * shape.H} heads and {shape.S} keys: {needed / 2**30:.1f} GiB"
        raise bad_value(
            "weights", f"at most {LIMIT / 2**30:.0f} GiB of them", given_rows, "Ask for fewer rows at a time"
        )
    return index


def weights_of_rows(
    q: Array, k: Array, shape: Shape, scoring: Scoring, index: NDArray[np.int64], origin: Origin
) -> Any:
    """(..., H, rows, S) in the caller's dtype and family."""
    from levelhead import reference  # most calls do without it

    lead = (*shape.batch, shape.H)
    chosen = np.empty((*lead, len(index), shape.S), origin.wide)
    q = q.reshape(*lead, shape.T, shape.D)
    sinks = np.asarray(-np.inf) if scoring.sinks is None else scoring.sinks[:, None, None]
    step = max(1, _AT_A_TIME // max(shape.B * shape.H * shape.S, 1))
    for start in range(0, len(index), step):
        rows = index[start : start + step]
        part = replace(shape, T=len(rows))
        with np.errstate(all="ignore"):
            s = reference.logits_of(q[..., rows, :], k, part, scoring.of_rows(rows), rows)
            m = np.maximum(s.max(-1, initial=-np.inf, keepdims=True), sinks)
            e = np.where(s == -np.inf, 0.0, np.exp(s - m))
            # Not exp(s - logsumexp): far from zero, that has lost the sum of the exponentials.
            weights = np.where(e == 0, 0.0, e / (e.sum(-1, keepdims=True) + np.exp(sinks - m)))
        chosen[..., start : start + len(rows), :] = weights
    chosen = chosen.reshape(*shape.lead, len(index), shape.S)
    narrow = as_bfloat16(chosen) if origin.dtype == "bfloat16" else chosen.astype(origin.native, copy=False)
    return origin.give(narrow)
