"""An `Observation` as the `Run` of one module in one step, so that `diagnose` takes it.

An observation has the statistics of one call and its soft cap, and nothing about a model: d_k, scale and mask are not
known, so checks that need them do not apply.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead import stats
from levelhead.observation import Observation
from levelhead.runs import tally
from levelhead.runs.record import Facts, Record, Run, Snapshot
from levelhead.runs.tally import Floats


def as_run(observation: Observation) -> Run:
    """The run that a watch of this one call would have recorded."""
    rows = observation.rows
    lead = rows.count.shape if rows.count.ndim > 1 else (1, *rows.count.shape)
    *_, H, T = lead
    facts = Facts(
        kind="Observation",
        how="levelhead",
        d_k=0,
        kv_heads=H,
        queries=T,
        keys=observation.keys,
        dtype=observation.origin.dtype,
        scale=None,
        scale_reading="not kept by an observation",
        softcap=observation.cap,
        causal=True,
        masked=True,  # either is possible, and these are the careful readings
        sinks=observation.sinks is not None,
        fused=True,
    )
    record = Record("observation", facts, tally_of(rows, observation.exists))
    return Run("observation", (Snapshot(0, (record,)),))


def tally_of(rows: stats.Rows, exists: NDArray[np.bool_] | None = None) -> Floats:
    """The tally (H, columns) of rows (..., H, T)."""

    def by_head(x: NDArray[np.generic]) -> Floats:
        x = np.atleast_2d(x)
        *batch, H, T = x.shape
        return np.moveaxis(x, -2, 0).reshape(1, H, math.prod(batch) * T).astype(np.float64)

    fields: dict[str, Any] = {name: by_head(getattr(rows, name)) for name in rows.__slots__}
    if exists is not None:
        fields["exists"] = by_head(np.broadcast_to(exists, rows.count.shape)) > 0
    _, H, number = fields["count"].shape
    return tally.of_rows(fields, length=rows.count.shape[-1]) if number else tally.nothing(H)
