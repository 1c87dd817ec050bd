"""Recorded results as numbers of the course, and what the core measures of one head."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead import stats
from levelhead.attention import observe
from levelhead.course.numbers import Number, recorded
from levelhead.lab import recorded as records
from levelhead.lab.figures import parts
from levelhead.weights import weights


@cache
def claim(id: str) -> dict[str, Any]:
    """A claim's recorded result. Callers share it and must not change it."""
    found: dict[str, Any] = next(one for one in records.load("claims")["results"] if one["id"] == id)
    return found


def claim_number(id: str, value: float, digits: int = 2, *, stderr: float | None = None) -> Number:
    """A number of `claim(id)`, with the date and the machine of its measurement, or the file that it was read from."""
    about = claim(id)["about"]
    where = f"{about['date']}, {about['cpu']}" if "date" in about else about["from"]
    return recorded(value, f"{id}, {where}", digits, stderr=stderr)


def measured(id: str, name: str, at: int | str | None = None, digits: int = 2) -> Number:
    """`measured[name]` of a claim, or its element `at`, with its standard error where the record has one."""
    value, error = claim(id)["measured"][name], (claim(id)["stderr"] or {}).get(name)
    if at is not None:
        value, error = value[at], error and error[at]
    return claim_number(id, value, digits, stderr=error)


def curve(id: str, name: str, x: float, digits: int = 2) -> Number:
    """The point at `x` of a claim's recorded curve."""
    found = claim(id)["details"][name]
    at = found["x"].index(float(x))
    return claim_number(id, found["y"][at], digits, stderr=found["stderr"][at])


def head(q: NDArray[np.float32], k: NDArray[np.float32], scale: float) -> dict[str, Any]:
    """What the core says of one head: weights of its first row, statistics, and the gauge as the page draws it.

    `left` is 1 − Σp², the trace of the softmax's Jacobian: how many keys can still move.
    """
    rows = observe(q, k, scale=scale).rows
    row = stats.Rows(*(getattr(rows, name).reshape(-1)[:1] for name in stats.Rows.__slots__))
    gauge = parts.gauge_of("", row)
    return {
        "weights": weights(q, k, scale).reshape(-1, k.shape[-2])[0].tolist(),
        "top1": row.top1.item(),
        "left": 1 - row.sum_p2.item(),
        "entropy": row.entropy.item(),
        "gauge": {"level": gauge.level, "bubble": gauge.bubble, "normalised_entropy": gauge.normalised_entropy},
    }
