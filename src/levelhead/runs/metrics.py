"""A snapshot as a flat dictionary of numbers, for any logger.

    attention/all/{statistic}                  every head of the model
    attention/{module}/{statistic}             every head of a module
    attention/{module}/head_{h}/{statistic}    one head
    attention/{module}/{projection}/grad_norm  where gradients are watched
    attention/{module}/sampled_rows            of each head, where not all were measured: maxima are lower bounds

Statistics are named as in `tally.Heads`. What holds for several heads is read off their joined tally, so a maximum is
the maximum, a mean runs over all their query rows, and a share is a share of those rows. A statistic that nothing was
seen of (NaN or infinite) is left out, never reported as 0. Names hold letters, digits, `_ . - /` and spaces, which
every logger takes. This file judges nothing and sends nothing anywhere.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from levelhead.runs import row_sample, tally
from levelhead.runs.record import Record, Snapshot
from levelhead.runs.tally import LEVELS, Floats, Heads

_NAMES = (
    "max_logit min_logit logit_std mean_logsumexp normalised_entropy effective_keys mean_top1 saturated gradient "
    "mean_first mean_sink empty_rows nan_rows q_rms k_rms dq_norm dk_norm dv_norm"
)
STATISTICS = tuple(_NAMES.split())
ALL = "all"  # in the place of a module: the whole model
ROOT = "model"  # the module that is the model itself has no name of its own

_REFUSED = re.compile(r"[^/\w.\- ]", re.ASCII)  # what MLflow, the strictest, does not take


def metrics(snapshot: Snapshot, *, heads: bool = True, prefix: str = "attention") -> dict[str, float]:
    """The numbers of a snapshot by name; with heads=False only those of modules and of the model.

    >>> metrics(Snapshot(0, ()))
    {}
    """
    numbers: dict[str, float] = {}
    for record, name in zip(snapshot.records, names(snapshot), strict=True):
        at = f"{prefix}/{name}"
        numbers |= {f"{at}/{key}": value for key, value in _module(record)}
        if heads:
            columns = statistics(record.heads)
            for head in range(len(record.tally)):
                values = _at(head, columns, record.facts.sinks)
                numbers |= {f"{at}/head_{head}/{key}": value for key, value in values}
    if snapshot.records:
        numbers |= {f"{prefix}/{ALL}/{key}": value for key, value in _together(snapshot.records)}
    return numbers


def statistics(heads: Heads) -> dict[str, Floats]:
    """The statistics of `STATISTICS`, (H,) each."""
    with np.errstate(all="ignore"):
        derived = {"logit_std": np.sqrt(heads.var_logit)}
    return {key: derived[key] if key in derived else np.asarray(getattr(heads, key), np.float64) for key in STATISTICS}


def names(snapshot: Snapshot) -> list[str]:
    """A name for each record that every logger takes; no two are alike."""
    taken = [ALL]
    for record in snapshot.records:
        name = clean(record.module) or ROOT
        spellings = (f"{name}-{n}" if n > 1 else name for n in itertools.count(1))
        taken.append(next(spelling for spelling in spellings if spelling not in taken))
    return taken[1:]


def clean(name: str) -> str:
    """The name with `_` for what a logger may refuse."""
    return _REFUSED.sub("_", name)


def _module(record: Record) -> Iterator[tuple[str, float]]:
    yield from _together([record])
    if record.facts.effective_scale is not None:
        yield from _finite([("effective_scale", record.facts.effective_scale)])
    yield from _finite((f"{clean(part)}/grad_norm", x) for part, x in record.weights.items())


def _together(records: Iterable[Record]) -> Iterator[tuple[str, float]]:
    records = list(records)
    joined = tally.over_heads(np.concatenate([record.tally for record in records]))
    columns = statistics(tally.read(joined))
    yield from _at(0, columns, any(record.facts.sinks for record in records))
    if sampled := [row_sample.measured(record) for record in records if record.facts.sampled]:
        yield "sampled_rows", float(min(sampled))
    levels = Counter(level for record in records for level in record.heads.levels)
    yield from ((f"heads_{level}", float(levels[level])) for level in LEVELS)


def _at(head: int, columns: Mapping[str, Floats], sinks: bool) -> Iterator[tuple[str, float]]:
    # The weight of a sink where there is none would be a chart of zeros.
    pairs = ((key, float(x[head])) for key, x in columns.items() if sinks or key != "mean_sink")
    return _finite(pairs)


def _finite(pairs: Iterable[tuple[str, float]]) -> Iterator[tuple[str, float]]:
    return ((key, value) for key, value in pairs if math.isfinite(value))
