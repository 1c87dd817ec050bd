"""The tally of a head: what any number of calls leave behind, in columns that merge.

A row of numbers per head. Each column is a sum, a minimum or a maximum over query rows, or the place of the largest
logit; so tallies of batches, micro-batches, ranks and runs join exactly, in any number and in order. Rows with a NaN
are counted and kept out of everything else. This file names the columns, sums rows up, joins tallies and reads
statistics off them. Sums and joins are written once for NumPy and torch: `xp` is the namespace of the arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from levelhead import stats

Floats: TypeAlias = NDArray[np.float64]

SUMS = (
    "rows",  # query rows with a visible key, NaN aside
    "lone_rows",  # rows with fewer than two visible keys
    "empty_rows",  # rows with none
    "nan_rows",  # rows with a NaN or +inf logit: in no other column
    "mean",  # of a row's logits; from here on summed over `rows`
    "var",
    "max",  # a row's largest logit
    "logsumexp",
    "entropy",
    "top1",
    "sum_p2",
    "first",
    "sink",
    "several",  # rows with at least two visible keys; the next three run over them
    "saturated",
    "normalised_entropy",
    "effective_keys",
    "q_squares",  # Σ q² at the call, and how many numbers that were
    "q_count",
    "k_squares",
    "k_count",
    "dq_squares",  # Σ (dL/dq)², where gradients are watched
    "dk_squares",
    "dv_squares",
    "gradients",  # backward passes that were counted there
)
MINIMA = ("min_logit", "min_logsumexp", "min_entropy")
MAXIMA = ("max_logit", "max_logsumexp", "max_entropy", "max_top1")
PLACES = ("max_batch", "max_query", "max_key")  # of max_logit; -1: none
COLUMNS = (*SUMS, *MINIMA, *MAXIMA, *PLACES)
INDEX = {name: i for i, name in enumerate(COLUMNS)}

SUM = slice(0, len(SUMS))
MIN = slice(SUM.stop, SUM.stop + len(MINIMA))
MAX = slice(MIN.stop, MIN.stop + len(MAXIMA))
PLACE = slice(MAX.stop, len(COLUMNS))
LARGEST = INDEX["max_logit"]
LEVELS: tuple[stats.Level, ...] = ("flat", "level", "sharp", "saturated")

NOTHING = (0.0,) * len(SUMS) + (np.inf,) * len(MINIMA) + (-np.inf,) * len(MAXIMA) + (-1.0,) * len(PLACES)


def nothing(heads: int) -> Floats:
    """The tally of no call: merging it changes nothing."""
    return np.tile(np.asarray(NOTHING), (heads, 1))


def merge(a: Any, b: Any, xp: Any = np) -> Any:
    """Both together; where the largest logit is in both, its place is a's, the earlier one."""
    later = (b[:, LARGEST] > a[:, LARGEST])[:, None]
    parts = (
        a[:, SUM] + b[:, SUM],
        xp.minimum(a[:, MIN], b[:, MIN]),
        xp.maximum(a[:, MAX], b[:, MAX]),
        xp.where(later, b[:, PLACE], a[:, PLACE]),
    )
    return xp.concatenate(parts, 1)


def weigh(tally: Any, times: float) -> None:
    """Makes each measured row stand for so many, in place. Rows with a NaN stay those that were found; the columns of
    q, k and gradients are of all rows."""
    tally[:, : INDEX["nan_rows"]] *= times
    tally[:, INDEX["mean"] : INDEX["q_squares"]] *= times


_MEANS = ("mean", "var", "max", "logsumexp", "entropy", "top1", "sum_p2", "first", "sink")  # of rows
_EXTREMES = {
    "min_logit": "min",
    "min_logsumexp": "logsumexp",
    "min_entropy": "entropy",
    "max_logit": "max",
    "max_logsumexp": "logsumexp",
    "max_entropy": "entropy",
    "max_top1": "top1",
}


def of_rows(rows: Mapping[str, Any], xp: Any = np, *, length: int | None = None, positions: Any = None) -> Any:
    """The tally (H, columns) of at least one row; without q, k and gradients.

    Args:
        rows: the fields of `stats.Rows` by name, (B, H, T) each; `exists`, where some rows do not count.
        length: of a sequence, if several of them lie one after another along T.
        positions: of the rows, if they are only some of their sequence, (T,) or (B, T).
    """
    count, wrong = rows["count"], xp.isnan(rows["logsumexp"])
    real_rows = ~wrong
    if "exists" in rows:
        real_rows, wrong = real_rows & rows["exists"], wrong & rows["exists"]
    some, several = (count > 0) & real_rows, (count > 1) & real_rows
    B, H, T = count.shape
    ones = xp.ones_like(rows["mean"])  # counts times these have the rows' precision
    outcomes = xp.where(count > 2, count, 2) + (rows["sink"] > 0)
    summed = {name: (rows[name], some) for name in _MEANS} | {
        "rows": (ones, some),
        "lone_rows": (ones, ~several & real_rows),
        "empty_rows": (ones, (count == 0) & real_rows),
        "nan_rows": (ones, wrong),
        "several": (ones, several),
        "saturated": (ones, several & (rows["top1"] >= stats.SATURATED_ROW)),
        "normalised_entropy": (rows["entropy"] / xp.log(outcomes * ones), several),
        "effective_keys": (xp.exp(rows["entropy"]), several),
    }
    columns = {name: xp.where(kept, x, 0).sum((0, 2)) for name, (x, kept) in summed.items()}
    for name, field in _EXTREMES.items():
        sign = -1.0 if name in MINIMA else 1.0
        columns[name] = xp.amax(xp.where(some, rows[field] * sign, -np.inf), (0, 2)) * sign

    def by_head(x: Any) -> Any:
        return xp.swapaxes(x, 0, 1).reshape(H, B * T)

    at = by_head(xp.where(some, rows["max"], -np.inf)).argmax(1)
    batch, row = at // (length or T), at % (length or T)
    head = xp.cumsum(xp.ones_like(at), 0) - 1  # on the device of the arrays
    if positions is not None:
        row = positions[row] if positions.ndim == 1 else positions[batch, row]
    place = (batch, row, by_head(rows["argmax"])[head, at])
    seen = by_head(some).any(1)
    columns |= {name: xp.where(seen, x, -1) * ones[0, :, 0] for name, x in zip(PLACES, place, strict=True)}
    nothing = xp.zeros_like(columns["rows"])
    return xp.stack([columns.get(name, nothing) for name in COLUMNS], 1)


def over_heads(tally: Floats) -> Floats:
    """All heads (H, columns) as one, (1, columns): what `merge` makes of them."""
    if not len(tally):
        return nothing(1)
    joined = tally[[np.argmax(tally[:, LARGEST])]]  # a copy, with the place of the largest logit
    joined[:, SUM] = tally[:, SUM].sum(0)
    joined[:, MIN] = tally[:, MIN].min(0)
    joined[:, MAX] = tally[:, MAX].max(0)
    return joined


@dataclass(frozen=True, slots=True)
class Heads(stats.Heads):
    """Statistics per head, (H,) each, as in `stats.Heads`, and those that only a watch has."""

    nan_rows: Floats
    mean_max: Floats  # mean of the rows' largest logits
    max_batch: Floats  # batch row of the largest logit
    q_rms: Floats  # of the queries at the call
    k_rms: Floats
    dq_norm: Floats  # NaN unless gradients are watched: root mean square over backward passes
    dk_norm: Floats
    dv_norm: Floats

    @property
    def levels(self) -> list[stats.Level]:
        """The level of each head."""
        pairs = zip(self.normalised_entropy, self.saturated, strict=True)
        return [stats.level(float(entropy), float(share)) for entropy, share in pairs]


def read(tally: Floats) -> Heads:
    """The statistics of a tally (H, columns); NaN where nothing was recorded."""
    column = dict(zip(COLUMNS, np.asarray(tally, np.float64).T, strict=True))
    with np.errstate(all="ignore"):

        def mean(name: str, over: str = "rows") -> Any:
            return column[name] / column[over]

        extremes = ("min_logsumexp", "max_logsumexp", "min_entropy", "max_entropy", "max_top1")
        return Heads(
            **{name: np.rint(column[name]).astype(np.int64) for name in _WHOLE},
            **{name: np.where(column["rows"] > 0, column[name], np.nan) for name in extremes},
            **{name: mean(name, "several") for name in ("saturated", "normalised_entropy", "effective_keys")},
            **{f"{name}_norm": np.sqrt(mean(f"{name}_squares", "gradients")) for name in ("dq", "dk", "dv")},
            **{f"{name}_rms": np.sqrt(mean(f"{name}_squares", f"{name}_count")) for name in ("q", "k")},
            **{f"{name}_logit": mean(name) for name in ("mean", "var")},
            **{f"mean_{name}": mean(name) for name in _MEANS if name not in ("mean", "var")},
            min_logit=column["min_logit"],
            max_logit=column["max_logit"],
            gradient=1.0 - mean("sum_p2"),
        )


_WHOLE = ("rows", "lone_rows", "empty_rows", "nan_rows", "max_query", "max_key", "max_batch")
