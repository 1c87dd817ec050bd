"""The statistics that a watch must report, from the reference in float64 on what a function really computed."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from torch import Tensor

from levelhead import reference, stats
from levelhead.runs.record import Record


def truth(q: Tensor, k: Tensor, mask: Tensor | None = None, used: Tensor | None = None, **options: Any) -> stats.Heads:
    """Of a call (B, H, T, D); `used` (B, T): the rows that count."""
    arrays = [x.detach().double().numpy() for x in (q, k)]
    given = None if mask is None else mask.detach().double().expand(*q.shape[:3], k.shape[2]).numpy()
    rows = reference.observe(*arrays, mask=given, **options).rows
    fields = {f.name: getattr(rows, f.name).swapaxes(0, 1) for f in dataclasses.fields(stats.Rows)}  # (H, B, T)
    chosen = slice(None) if used is None else used.flatten().numpy()
    return stats.heads(stats.Rows(**{n: x.reshape(q.shape[1], -1)[:, chosen] for n, x in fields.items()}))


def agrees(record: Record, wanted: stats.Heads, *, places: bool = True) -> None:
    """`places`: keys have the same index in the call as in its description."""
    left_out = ["max_query", "max_key", *([] if places else ["mean_first"])]
    for name in [f.name for f in dataclasses.fields(stats.Heads) if f.name not in left_out]:
        given, true = getattr(record.heads, name), getattr(wanted, name)
        np.testing.assert_allclose(given, true, rtol=1e-4, atol=1e-5, err_msg=name)
