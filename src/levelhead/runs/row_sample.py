"""How exact statistics of sampled query rows are, in numbers and in words.

`watching.taken_rows` takes the rows; reports and findings say here what a sample leaves open.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from levelhead.runs import tally
from levelhead.runs.record import Record

# A row's saturation, top-1 weight and H/ln n lie in [0, 1], so their standard deviation is at most 1/2, and the
# standard error of a mean over n rows is at most 1 / (2 √n): independent rows, one of each stratum of equal size, have
# no larger one. A call on its own is to be within ERROR of all its rows; steps together are closer.
ERROR = 0.02
ROWS = round(0.25 / ERROR**2)  # 625, of all sequences of a call together


def error(record: Record) -> float:
    """The standard error of a head's shares, at most: over its rows that see several keys. Where calls were sampled
    unequally, as if each row stood for as many as in the scarcest sample."""
    rows = record.tally[:, tally.INDEX["several"]] / _weight(record)
    return 0.5 / math.sqrt(max(rows[rows > 0].min(initial=np.inf), 1.0))


def _weight(record: Record) -> float:
    return max(record.facts.row_weights, default=1.0)


def measured(record: Record) -> int:
    """How many rows of each head were measured; at least so many, where calls were sampled unequally."""
    several, empty, lost = (record.tally[:, tally.INDEX[name]] for name in ("rows", "empty_rows", "nan_rows"))
    each = (several + empty) / _weight(record) + lost
    return int(np.rint(each.max(initial=0.0)))


def of_how_many(record: Record) -> int:
    """How many rows each head had: all queries that count are in the sum of q²."""
    counts = record.tally[:, tally.INDEX["q_count"]]
    return int(counts.max(initial=0.0)) // max(record.facts.d_k, 1)


def missed(record: Record) -> float:
    """The chance of a row not to be measured."""
    if not record.facts.sampled:
        return 0.0
    if record.facts.row_weights:
        return 1.0 - 1.0 / _weight(record)
    return max(1.0 - measured(record) / max(of_how_many(record), 1), 0.0)  # of a version that did not record it


def rows(record: Record) -> str:
    """Which rows the statistics of a record are of."""
    if not record.facts.sampled:
        return "every row"
    n, whole = measured(record), of_how_many(record)
    least = "at least " if len(set(record.facts.row_weights)) > 1 else ""
    return f"{least}{n:,} sampled rows of {whole:,}" if whole > n else f"{least}{n:,} sampled rows"


def limits(records: Iterable[Record]) -> str:
    """What the sample of these records leaves open, by the least sure of them."""
    least = max(records, key=error)
    shares = f"shares within ±{error(least):.2g} (one standard error, at most)"
    return f"{rows(least)}, {shares}, maxima are lower bounds"
