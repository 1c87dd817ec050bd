"""An `Observation` as the `Run` of one module in one step, so that it can be judged like one.

An observation holds the statistics of one call and nothing about a model: neither d_k nor the scale
nor a mask is known afterwards, so what would need them is not judged.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from levelhead import stats
from levelhead.observation import Observation
from levelhead.runs import tally
from levelhead.runs.record import Facts, Record, Run, Snapshot
from levelhead.runs.tally import Floats


def as_run(seen: Observation) -> Run:
    """The run that a watch of this one call would have left."""
    rows = seen.rows
    lead = rows.count.shape if rows.count.ndim > 1 else (1, *rows.count.shape)
    *_, H, T = lead
    facts = Facts(
        kind="Observation",
        how="levelhead",
        d_k=0,
        kv_heads=H,
        queries=T,
        keys=seen.keys,
        dtype=seen.origin.dtype,
        scale=None,
        scale_reading="not kept by an observation",
        causal=True,
        masked=True,  # either is possible, and these are the careful readings
        sinks=seen.sinks is not None,
        fused=True,
    )
    record = Record("observation", facts, tally_of(rows))
    return Run("observation", (Snapshot(0, (record,)),))


def tally_of(rows: stats.Rows) -> Floats:
    """The tally (H, columns) of rows (..., H, T)."""

    def by_head(x: NDArray[np.generic]) -> Floats:
        x = np.atleast_2d(x)
        *batch, H, T = x.shape
        return np.moveaxis(x, -2, 0).reshape(H, math.prod(batch) * T).astype(np.float64)

    field = {name: by_head(getattr(rows, name)) for name in rows.__slots__}
    count, wrong = field["count"], np.isnan(field["logsumexp"])
    some, several = (count > 0) & ~wrong, (count > 1) & ~wrong
    ones = np.ones_like(count)
    over_some = ("mean", "var", "max", "logsumexp", "entropy", "top1", "sum_p2", "first", "sink")
    kept = {name: (field[name], some) for name in over_some}
    kept |= {
        "rows": (ones, some),
        "lone_rows": (ones, ~several & ~wrong),
        "empty_rows": (ones, (count == 0) & ~wrong),
        "nan_rows": (ones, wrong),
        "several": (ones, several),
        "saturated": (ones, several & (field["top1"] >= stats.SATURATED_ROW)),
        "normalised_entropy": (field["entropy"] / np.log(np.maximum(count, 2)), several),
        "effective_keys": (np.exp(field["entropy"]), several),
    }
    found = tally.nothing(len(count))
    for name, (x, keep) in kept.items():
        found[:, tally.INDEX[name]] = np.where(keep, x, 0.0).sum(1)
    for name in (*tally.MINIMA, *tally.MAXIMA):
        source = field[_EXTREMES[name]]
        if name in tally.MINIMA:
            found[:, tally.INDEX[name]] = np.where(some, source, np.inf).min(1, initial=np.inf)
        else:
            found[:, tally.INDEX[name]] = np.where(some, source, -np.inf).max(1, initial=-np.inf)
    _places(found, np.where(some, field["max"], -np.inf), field["argmax"], rows.count.shape[-1])
    return found


_EXTREMES = {
    "min_logit": "min",
    "min_logsumexp": "logsumexp",
    "min_entropy": "entropy",
    "max_logit": "max",
    "max_logsumexp": "logsumexp",
    "max_entropy": "entropy",
    "max_top1": "top1",
}


def _places(found: Floats, largest: Floats, keys: Floats, T: int) -> None:
    """Batch row, query and key of each head's largest logit."""
    if largest.shape[1] == 0:
        return
    at = largest.argmax(1)
    head = np.arange(len(found))
    seen = largest[head, at] > -np.inf
    places = {"max_batch": at // T, "max_query": at % T, "max_key": keys[head, at]}
    for name, x in places.items():
        found[:, tally.INDEX[name]] = np.where(seen, x, -1)
