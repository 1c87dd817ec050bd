"""Parts that several figures share: a histogram of logits, a row as bars, a curve over d_k, the gauge of rows.

Numbers in, parts of a figure out. Nothing here draws random numbers or computes attention.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead import stats
from levelhead.lab.figure import Axis, Chart, Fact, Gauge, Series, Source, snippet
from levelhead.lab.measure import WIDTHS, Curve, Setting
from levelhead.lab.parameters import POWER

Array = NDArray[Any]

AXIS = Axis("d_k", log=True, range=(1.0, float(WIDTHS[-1])))
BINS = 61  # an odd number: one of them is in the middle
REACH = 6.0  # standard deviations to either side; beyond lies 1 in 1000 where tails are heaviest
SHARE = (0.0, 1.02)  # of an axis of weights or shares, whatever the data: flat looks flat, one-hot looks one-hot
DENSITY = (0.0, 0.5)  # of an axis of densities: the normal law of variance 1 reaches 0.4
NORM = (0.0, 0.51)  # of ‖J‖_F, which is 1/2 at most: two keys of weight 1/2
BARS = 128  # of a row; longer ones are shown in groups of neighbouring keys


def histogram(s: Array, middle: float, deviation: float, most: float = math.inf) -> tuple[Array, Array, Array]:
    """Edges of the bins, their middles, and the density of s in them.

    Bins reach as far as logits do in theory, but no farther than `most`, so that narrow histograms are as fine as wide
    ones.
    """
    half = min(REACH * deviation, most) if deviation > 0 else 1.0
    edges = np.linspace(middle - half, middle + half, BINS + 1)
    counts, _ = np.histogram(s, edges)
    return edges, (edges[1:] + edges[:-1]) / 2, counts / (s.size * np.diff(edges))


def outside(s: Array, frame: tuple[float, float], density: Array) -> dict[str, float]:
    """What a frame does not show of a histogram: the shares to its left and right, and a peak above it."""
    shares = {"left": float((s < frame[0]).mean()), "right": float((s > frame[1]).mean())}
    peak = float(density.max())
    return {side: share for side, share in shares.items() if share > 0} | ({"above": peak} if peak > DENSITY[1] else {})


def beyond(outside: Mapping[str, float], edge: float) -> str:
    """The same in words, for the text alternative; "" where the frame holds all."""
    sides = [
        f"{outside[side]:.0%} {words}"
        for side, words in (("left", f"below {-edge:g}"), ("right", f"above {edge:g}"))
        if side in outside
    ]
    peak = [f"the highest bar reaches {outside['above']:.3g}"] if "above" in outside else []
    return "".join(f"; {part}" for part in (*sides, *peak))


def code(id: str, setting: Setting, **own: Any) -> str:
    """The Python that prints a figure's numbers again; `own` are its own parameters."""
    shared = {name: value for name, value in vars(setting).items() if name != "power" or setting.scale == POWER}
    return snippet(id, **shared, **own)


def line(curve: Curve, name: str) -> Series:
    """A measured curve with a band of two standard errors to either side."""
    mean, error = np.asarray(curve.y), np.asarray(curve.stderr)
    if not np.isfinite(error).all():  # a single row has no error
        return Series(name, "live", "line", curve.x, mean)
    return Series(name, "live", "line", curve.x, mean, low=mean - 2 * error, high=mean + 2 * error)


def ends(curves: Mapping[str, Curve]) -> str:
    """The first and the last value of each curve as text."""
    return "; ".join(f"{name}: {curve.y[0]:.3g} to {curve.y[-1]:.3g}" for name, curve in curves.items())


@dataclass(frozen=True)
class Spread:
    """The standard deviation of a sample, with its standard error."""

    sigma: float
    stderr: float


def spread(s: Array) -> Spread:
    """σ̂ of s. Its error follows from the fourth moment, as tails may be heavy:
    Var(σ̂²) ≈ (m₄ - σ⁴)/N, and σ̂ = √σ̂² halves it over σ."""
    off = s.astype(np.float64) - s.mean(dtype=np.float64)
    second, fourth = float((off**2).mean()), float((off**4).mean())
    if second == 0:
        return Spread(0.0, 0.0)
    sigma = math.sqrt(second * s.size / (s.size - 1))
    return Spread(sigma, math.sqrt(max(fourth - second**2, 0.0) / s.size) / (2 * sigma))


def mean(x: Array) -> tuple[float, float]:
    """The mean of a sample and its standard error."""
    x = x.astype(np.float64)
    return float(x.mean()), float(x.std(ddof=1) / math.sqrt(x.size)) if x.size > 1 else 0.0


def together(keys: int) -> int:
    """How many neighbouring keys share a bar."""
    return -(-keys // BARS)


def row_chart(heights: Array, keys: int, title: str, *, axis: str = "key") -> Chart:
    """One attention row as bars, in the order of its keys, with 1/n as what a flat one has."""
    shared = together(keys)
    first = np.arange(0, keys, shared)
    unit = "weight" if shared == 1 else f"weight of {shared} neighbouring keys together"
    bars = Series("weights", "live", "bars", first, heights)
    flat = Series("flat: 1/n each", "theory", "line", first[[0, -1]], [shared / keys] * 2)
    about = f"the weights of {keys} keys, 1 in all; the largest bar holds {heights.max():.3g}"
    return Chart(title, Axis(axis), Axis(unit, range=SHARE), (bars, flat), about)


def gauge(label: str, entropy: float, saturated: float, source: Source = "live") -> Gauge:
    """The spirit level of H/ln n and of the share of rows that are near one-hot."""
    level = stats.level(entropy, saturated)
    place = stats.bubble(entropy, level)
    return Gauge(label, level, None if place is None else place / 8, entropy, source)


def gauge_of(label: str, rows: stats.Rows) -> Gauge:
    """The spirit level of these rows together, each with at least two keys."""
    heads = stats.heads(flattened(rows))
    return gauge(label, float(heads.normalised_entropy), float(heads.saturated))


def flattened(rows: stats.Rows) -> stats.Rows:
    """The rows of all heads as those of one."""
    return stats.Rows(*(getattr(rows, name).reshape(-1) for name in stats.Rows.__slots__))


def row_facts(rows: stats.Rows) -> tuple[Fact, ...]:
    """The statistics of one row."""
    entropy, n = float(rows.entropy.item()), int(rows.count.item())
    return (
        Fact("H/ln n of the row", entropy / math.log(n), "live"),
        Fact("largest weight", float(rows.top1.item()), "live"),
        Fact("effective keys, exp H", math.exp(entropy), "live"),
        Fact("gradient left, 1 - Σp²", float(1 - rows.sum_p2.item()), "live"),
    )
