"""The steps of attention, measured by the core one at a time: logits, weights (`levelhead.weights`), gauges.

The core never forms logits: each is the logsumexp of a row that sees one key, which costs a call per key. Nothing here
is a second implementation of attention.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from levelhead import stats
from levelhead.attention import observe
from levelhead.call.scoring import Scoring
from levelhead.explanation.head import Array, Gauge
from levelhead.weights import weights

__all__ = ["gauges", "logits", "of_key", "weights"]


def gauges(q: Array, k: Array, scale: Any, **options: Any) -> tuple[Gauge, ...]:
    """Where the bubble of each head stands."""
    heads = observe(q, k, scale=scale, **options).heads
    columns = (heads.normalised_entropy, heads.saturated, heads.mean_top1, heads.max_logit)
    rows = zip(*(np.atleast_1d(column).tolist() for column in columns), strict=True)
    return tuple(
        Gauge(stats.level(entropy, saturated), entropy, top1, largest) for entropy, saturated, top1, largest in rows
    )


def logits(q: Array, k: Array, scale: Any, scored: Scoring | None = None) -> Array:
    """(…, T, S): scale · q·k; with `scored`, what of it enters the softmax."""
    columns = [
        observe(q, k[..., j : j + 1, :], scale=scale, **({} if scored is None else of_key(scored, j))).logsumexp
        for j in range(k.shape[-2])
    ]
    return np.stack(columns, -1)


def of_key(scored: Scoring, j: int) -> dict[str, Any]:
    """The options of a call whose only key is the j-th: positions count from there."""
    options: dict[str, Any] = {
        "causal": scored.causal,
        "window": (scored.left, scored.right),
        "mask": None if scored.mask is None else scored.mask[..., j : j + 1],
        "softcap": scored.softcap,
        "alibi": scored.alibi,
        "query_start": scored.query_start[0] - j,
    }
    if scored.key_lengths is not None:
        options["key_lengths"] = np.clip(scored.key_lengths[0] - j, 0, 1)
    if scored.query_segments is not None and scored.key_segments is not None:
        options["segments"] = (scored.query_segments[0], scored.key_segments[0, j : j + 1])
    return options
