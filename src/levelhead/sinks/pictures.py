"""What charts are drawn from: a histogram over the heads of a module, a map of layers and heads.

NumPy alone. Which dashboard shows them is not known here.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from levelhead import stats
from levelhead.runs.metrics import names, statistics
from levelhead.runs.record import Snapshot
from levelhead.runs.tally import Floats

HISTOGRAMS = ("max_logit", "logit_std", "normalised_entropy", "saturated", "gradient")
SHARES = {"normalised_entropy", "saturated", "gradient"}  # bins that stay where they are over time
BINS = 20
CELL = 12  # pixels a head

# Colours of the gauge at `stats.ENTROPIES`: saturated red, sharp amber, level green, flat blue, and between.
COLOURS = ((165, 15, 21), (222, 45, 38), (254, 196, 79), (49, 163, 84), (107, 174, 214), (8, 69, 148))
UNSEEN = (200, 200, 200)


def histograms(snapshot: Snapshot) -> Iterator[tuple[str, Floats, NDArray[np.int64], Floats]]:
    """For each module and statistic: "module/statistic", the heads' values, counts and edges."""
    for record, name in zip(snapshot.records, names(snapshot), strict=True):
        by_name = statistics(record.heads)
        for statistic in HISTOGRAMS:
            values = by_name[statistic][np.isfinite(by_name[statistic])]
            if not len(values):
                continue
            bounds = (0.0, 1.0) if statistic in SHARES else None
            # A share may be past 1 by a rounding, and would then be in no bin.
            inside = np.clip(values, *bounds) if bounds else values
            counts, edges = np.histogram(inside, BINS, bounds)
            yield f"{name}/{statistic}", values, counts, edges


def entropy_map(snapshot: Snapshot) -> Floats:
    """Normalised entropy, a row per module and a column per head; NaN where there is none."""
    rows = [record.heads.normalised_entropy for record in snapshot.records]
    entropies = np.full((len(rows), max(map(len, rows), default=0)), np.nan)
    for into, row in zip(entropies, rows, strict=True):
        into[: len(row)] = row
    return entropies


def coloured(entropies: Floats, cell: int = CELL) -> NDArray[np.uint8]:
    """The map as a picture (rows, columns, RGB), the first module on top."""
    known = np.nan_to_num(entropies)
    channels = [np.interp(known, stats.ENTROPIES, channel) for channel in np.array(COLOURS).T]
    picture = np.where(np.isnan(entropies)[..., None], UNSEEN, np.stack(channels, axis=-1))
    pixels: NDArray[np.uint8] = picture.round().astype(np.uint8)
    return pixels.repeat(cell, axis=0).repeat(cell, axis=1)
