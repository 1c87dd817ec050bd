"""The formulas of the statistics: a state's sums to fields per row, rows to fields per head, and the level that
summarises a head.

Everything is float64 here, whatever the dtype of the state. Only the sums are available here, no logit and no weight. A
level is a description, not a verdict on a model: a healthy trained model has saturated heads on purpose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from levelhead import state
from levelhead.call.options import namespace

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Level: TypeAlias = Literal["flat", "level", "sharp", "saturated", "none"]

SATURATED_ROW = 0.99  # top-1 weight from which p(1 - p) < 0.01: next to no gradient passes
# Bounds on H/ln n. Gaussian logits of variance w have H ≈ ln n - w/2, so w = 1, what 1/√d_k aims
# at, reads 0.88 at 64 keys and 0.94 at 4096.
FLAT = 0.98  # w < 0.17 at 64 keys: the scores hardly tell keys apart
SHARP = 0.5  # attends to about √n of n keys
SATURATED = 0.1  # attends to about n^0.1 keys: 1.5 of 64, 2.3 of 4096
SATURATED_SHARE = 0.5  # or half of the rows are near one-hot, whatever the others do


@dataclass(frozen=True, slots=True)
class Rows:
    """One value per query row, shape (..., H, T). p are the softmax weights, a sink's included.

    A row without visible keys: count 0, mean and var NaN, min +inf, max -inf, argmax -1,
    logsumexp -inf (with a sink: the sink), entropy, top1 and first 0, sum_p2 and sink 0 (1).
    A row with a visible NaN or +inf logit is NaN throughout, with argmax -1.
    """

    count: Ints  # visible keys
    mean: Floats  # of the visible logits
    var: Floats  # of the visible logits, population
    min: Floats
    max: Floats
    argmax: Ints  # key position of the first maximum
    logsumexp: Floats  # natural log; a sink is one more term
    entropy: Floats  # -Σ p ln p in nats; a sink is one more outcome
    top1: Floats  # largest weight of a key
    sum_p2: Floats  # Σ p²; a sink is one more outcome. 1 - Σp² = Σp(1-p) scales the gradient
    first: Floats  # weight of the first key: of the row's segment, or at position 0 without segments
    sink: Floats  # weight of the sink


@dataclass(frozen=True, slots=True)
class Heads:
    """One value per head, shape (..., H). Means run over rows with a visible key, and are NaN
    where there is none; the last three run over rows with at least two."""

    rows: Ints  # rows with at least one visible key
    lone_rows: Ints  # rows with fewer than two
    empty_rows: Ints  # rows with none
    mean_logit: Floats
    var_logit: Floats
    min_logit: Floats  # +inf where no key is visible
    max_logit: Floats  # -inf where no key is visible
    max_query: Ints  # row of the largest logit (or of the first NaN); -1: none
    max_key: Ints  # its key position; -1: none, or NaN
    mean_logsumexp: Floats
    min_logsumexp: Floats
    max_logsumexp: Floats
    mean_entropy: Floats
    min_entropy: Floats
    max_entropy: Floats
    mean_top1: Floats
    max_top1: Floats
    mean_sum_p2: Floats
    gradient: Floats  # mean of 1 - Σp²
    mean_first: Floats
    mean_sink: Floats
    saturated: Floats  # share of rows with top1 >= SATURATED_ROW
    normalised_entropy: Floats  # mean of H/ln(count); a sink counts as one more key
    effective_keys: Floats  # mean of exp(H)


def rows(sums: Any, counts: Any, sinks: Any = None, exists: Any = None) -> Rows:
    """Read the statistics off the sums (..., H, T, 8) and counts (..., H, T, 2) of a state, NumPy's or torch's.

    `exists`, broadcastable to (..., H, T): rows that do not exist see no key and no sink.
    """
    xp = namespace(sums)
    wide = sums.astype(np.float64) if xp is np else sums  # not every device has float64
    columns = xp.moveaxis(wide, -1, 0)
    m, l, h, e2, mean, m2, low, first = (x * unit for x, unit in zip(columns, state.NATURAL, strict=True))  # noqa: E741
    count, argmax = counts[..., state.COUNT], counts[..., state.ARGMAX]
    z = xp.full_like(m[..., :1], -np.inf) if sinks is None else sinks if sums.ndim == 2 else sinks[:, None]
    z = z if exists is None else xp.where(exists, z, -np.inf)
    with np.errstate(all="ignore"):
        # The sink joins as one more key; with neither key nor sink, any finite top will do.
        top = xp.maximum(m, z)
        top = xp.where(top == -np.inf, 0.0, top)
        keys, sink = xp.exp(m - top), xp.exp(z - top)
        total = keys * l + sink

        def times(weight: Any, x: Any) -> Any:  # a weight of 0 wins over an infinite x
            return xp.where(weight == 0, 0.0, weight * x)

        def share(x: Any) -> Any:
            return xp.where(total == 0, 0.0, x / total)

        spread = times(keys, h + (m - top) * l) + times(sink, z - top)
        return Rows(
            count=count,
            mean=xp.where(count == 0, np.nan, mean),
            var=m2 / count,
            min=low,
            max=m,
            argmax=argmax,
            logsumexp=top + xp.log(total),
            entropy=xp.clip(xp.where(total == 0, 0.0, xp.log(total)) - share(spread), 0.0, None),
            top1=share(keys),
            sum_p2=xp.clip(share(share(keys**2 * e2 + sink**2)), None, 1.0),
            first=share(xp.exp(first - top)),
            sink=share(sink),
        )


def heads(rows: Rows, exists: Any = None) -> Heads:
    """Sum the rows (..., H, T) of each head up, NumPy's or JAX's; `exists`: those that count, broadcastable to the
    rows."""
    xp = namespace(rows.count)
    some, several = rows.count > 0, rows.count > 1
    T = rows.count.shape[-1]
    total = T if exists is None else xp.broadcast_to(exists, rows.count.shape).sum(-1)
    top = xp.argmax(rows.max, axis=-1) if T else xp.zeros(rows.count.shape[:-1], int)
    key = xp.take_along_axis(rows.argmax, top[..., None], -1)[..., 0] if T else top - 1
    with np.errstate(all="ignore"):
        n, seen = some.sum(-1), xp.log(rows.count + (rows.sink > 0))
        return Heads(
            rows=n,
            lone_rows=total - several.sum(-1),
            empty_rows=total - n,
            mean_logit=_mean(rows.mean, some),
            var_logit=_mean(rows.var, some),
            min_logit=rows.min.min(-1, initial=np.inf),
            max_logit=rows.max.max(-1, initial=-np.inf),
            max_query=xp.where(n == 0, -1, top),
            max_key=key,
            mean_logsumexp=_mean(rows.logsumexp, some),
            min_logsumexp=-_largest(-rows.logsumexp, some),
            max_logsumexp=_largest(rows.logsumexp, some),
            mean_entropy=_mean(rows.entropy, some),
            min_entropy=-_largest(-rows.entropy, some),
            max_entropy=_largest(rows.entropy, some),
            mean_top1=_mean(rows.top1, some),
            max_top1=_largest(rows.top1, some),
            mean_sum_p2=_mean(rows.sum_p2, some),
            gradient=_mean(1.0 - rows.sum_p2, some),
            mean_first=_mean(rows.first, some),
            mean_sink=_mean(rows.sink, some),
            saturated=_mean(rows.top1 >= SATURATED_ROW, several),
            normalised_entropy=_mean(rows.entropy / seen, several),
            effective_keys=_mean(xp.exp(rows.entropy), several),
        )


def level(normalised_entropy: float, saturated: float) -> Level:
    """Where the bubble stands: what a head's entropy and saturated share say; NaN: "none"."""
    if math.isnan(normalised_entropy):
        return "none"
    if saturated >= SATURATED_SHARE or normalised_entropy < SATURATED:
        return "saturated"
    if normalised_entropy < SHARP:
        return "sharp"
    return "flat" if normalised_entropy >= FLAT else "level"


# The tube has nine cells, level in the middle; H/ln n maps piecewise onto them, and a bubble
# never leaves the cells of its level.
CELLS: dict[Level, tuple[int, int]] = {"flat": (0, 1), "level": (2, 5), "sharp": (6, 7), "saturated": (8, 8)}
ENTROPIES, PLACES = (0.0, SATURATED, SHARP, 0.9, FLAT, 1.0), (8.0, 7.5, 5.5, 4.0, 1.5, 0.0)
LEVEL_ENDS = (1.5, 5.5)  # places where the cells of "level" begin and end; drawings have their marks there


def bubble(normalised_entropy: float, level: Level) -> float | None:
    """Where the bubble stands in its tube, 0 (flat) to 8 (saturated); None: there is none."""
    if level not in CELLS:
        return None
    low, high = CELLS[level]
    return min(max(float(np.interp(normalised_entropy, ENTROPIES, PLACES)), low), high)


def gauge(normalised_entropy: float, level: Level) -> str:
    """The spirit level in text, always 11 characters: bubble left is flat, right is saturated.

    >>> gauge(0.9, "level")
    '▕    ●    ▏'
    """
    place = bubble(normalised_entropy, level)
    if place is None:
        return "▕" + " " * 9 + "▏"
    return "▕" + " " * round(place) + "●" + " " * (8 - round(place)) + "▏"


def _mean(x: NDArray[Any], keep: NDArray[np.bool_]) -> Floats:
    result: Floats = namespace(x).where(keep, x, 0.0).sum(-1) / keep.sum(-1)
    return result


def _largest(x: Floats, keep: NDArray[np.bool_]) -> Floats:
    xp = namespace(x)
    largest: Floats = xp.where(keep.any(-1), xp.where(keep, x, -np.inf).max(-1, initial=-np.inf), np.nan)
    return largest
