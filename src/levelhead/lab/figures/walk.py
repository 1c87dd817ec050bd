"""One dot product is a walk of d_k random steps: why its variance is d_k, its spread the root."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from levelhead.lab import measure
from levelhead.lab.figure import Axis, Chart, Fact, Figure, Series
from levelhead.lab.figures import parts
from levelhead.lab.measure import Setting

NEEDS = ("d_k", "seed")
CLAIMS = ("C1", "C1a", "C2", "C3")
WALKS = 40
POINTS = 48  # of a walk, its beginning at 0 aside


def figure(setting: Setting) -> Figure:
    queries, keys = measure.pairs(setting)
    ends = measure.pair_logits(queries, keys, 1.0)
    spread, root = parts.spread(ends), math.sqrt(setting.d_k)
    share, error = parts.mean(np.abs(ends) > root)
    return Figure(
        "walk",
        "One product, d_k terms",
        (_chart(queries[:WALKS], keys[:WALKS], setting.d_k),),
        parts.code("walk", setting),
        facts=(
            Fact("spread of q·k measured", spread.sigma, "live", spread.stderr),
            Fact("spread of q·k in theory", root, "theory", formula="√d_k"),
            Fact("walks measured", ends.size, "live"),
            Fact("share that ends beyond ±√d_k", share, "live", error),
            *(_divided(one, spread, setting.d_k) for one in ("1/sqrt(d_k)", "1/d_k", "1/sqrt(d)")),
        ),
        note="Each term q_i k_i has mean 0 and variance 1. Variances of independent terms add up: "
        "after d_k steps the variance is d_k, so walks end about √d_k from where they began, on "
        "either side.",
    )


def _divided(scale: str, spread: parts.Spread, d_k: int) -> Fact:
    factor = measure.factor_of(scale, d_k)
    return Fact(f"spread {measure.divided(scale)}", spread.sigma * factor, "live", spread.stderr * factor)


def _chart(queries: NDArray[np.float32], keys: NDArray[np.float32], d_k: int) -> Chart:
    # Where a walk stands after t steps is the logit of the first t columns: each point is one
    # call of the core.
    steps = np.unique(np.linspace(0, d_k, min(POINTS, d_k) + 1).round().astype(int))
    sums = [measure.pair_logits(queries[:, :t], keys[:, :t], 1.0) for t in steps[1:]]
    paths = np.stack([np.zeros(len(queries), np.float32), *sums], axis=1)
    walks = [Series(f"walk {i + 1}", "live", "line", steps, _short(path), quiet=True) for i, path in enumerate(paths)]
    envelope = [
        Series(f"{sign}√t", "theory", "line", steps, factor * np.sqrt(steps))
        for sign, factor in (("+", 1.0), ("-", -1.0))
    ]
    about = f"{len(walks)} walks, most of them within ±{math.sqrt(d_k):.3g} after {d_k} steps"
    title = "q·k, term by term"
    return Chart(title, Axis("terms summed, t"), Axis("sum so far"), (*walks, *envelope), about)


def _short(path: NDArray[np.float32]) -> NDArray[np.float64]:
    """Three digits after the point at most: walks are drawn, and no number is read from them."""
    return np.round(path.astype(np.float64), 2 if np.abs(path).max() > 5 else 3)
