"""Why the root and not d_k itself: three statistics against the width, a line for each divisor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from levelhead.lab import theory
from levelhead.lab.figure import Axis, Chart, Fact, Figure, Series
from levelhead.lab.figures import parts
from levelhead.lab.measure import WIDTHS, Curve, Setting, divided, factor_of, over_nested_widths
from levelhead.lab.theory import Softmax

NEEDS = ("scale", "power", "keys", "seed")
CLAIMS = ("C5", "C9", "C10", "C11")
LINES = ("none", "1/sqrt(d_k)", "1/d_k", "1/sqrt(d)")

Expected = NDArray[np.float64]


def figure(setting: Setting) -> Figure:
    n = setting.keys
    scales = tuple(dict.fromkeys((*LINES, setting.scale)))  # the reader's own, if it is a power
    measured = {scale: over_nested_widths(n, setting.seed, scale, setting.power) for scale in scales}
    expected = {scale: _theory(setting, scale) for scale in scales}

    def chart(title: str, axis: Axis, name: str, of_row: Callable[[Softmax], float], alike: float = math.inf) -> Chart:
        curves = {divided(scale, setting.power): measured[scale][name] for scale in scales}
        lines = {divided(scale, setting.power): _line(rows, of_row, alike) for scale, rows in expected.items()}
        return _chart(title, axis, curves, lines)

    mine = measured[setting.scale]["entropy"]
    return Figure(
        "root",
        "Why the root, and not d_k?",
        (
            chart("Entropy", Axis("H/ln n", range=parts.SHARE), "entropy", lambda row: row.entropy / math.log(n)),
            chart("Largest weight", Axis("top-1 weight", range=parts.SHARE), "top1", lambda row: row.top1),
            # Theory has the root of a mean, which is the mean norm only where rows are alike.
            chart(
                "Gradient that passes",
                Axis("‖J‖_F, J = diag(p) - p pᵀ", range=parts.NORM),
                "jacobian",
                theory.jacobian,
                math.sqrt(2 * math.log(n)) / 3,
            ),
        ),
        parts.code("root", setting),
        facts=(
            Fact(f"H/ln n at d_k = 1, {divided(setting.scale, setting.power)}", mine.y[0], "live", mine.stderr[0]),
            *(
                Fact(
                    f"H/ln n at d_k = 4096, {divided(scale, setting.power)}",
                    curves["entropy"].y[-1],
                    "live",
                    curves["entropy"].stderr[-1],
                )
                for scale, curves in measured.items()
            ),
            Fact("weight of each key in a flat row", 1 / n, "theory", formula="1/n"),
            Fact("few keys take all from σ of", math.sqrt(2 * math.log(n)), "theory", formula="√(2 ln n)"),
        ),
        note="Only a divisor that grows like √d_k leaves rows as they are, however wide the head "
        "is. Undivided they collapse onto one key; divided by d_k they become flat. √(8 d_k), "
        "the root of a model's width with 8 heads, is constant too, but flatter. Bands are "
        "two standard errors.",
    )


def _theory(setting: Setting, scale: str) -> list[tuple[float, Softmax]]:
    """The spread of logits and the expected row at every width."""
    factors = [factor_of(scale, d_k, setting.power) for d_k in WIDTHS]
    spreads = [math.sqrt(d_k) * factor for d_k, factor in zip(WIDTHS, factors, strict=True)]
    return list(zip(spreads, theory.softmax_over(WIDTHS, setting.keys, factors), strict=True))


def _line(rows: list[tuple[float, Softmax]], of_row: Callable[[Softmax], float], alike: float) -> Expected:
    """Theory at every width; NaN where logits spread so far that rows are not alike."""
    return np.array([of_row(row) if spread < alike else math.nan for spread, row in rows])


def _chart(title: str, axis: Axis, measured: Mapping[str, Curve], expected: Mapping[str, Expected]) -> Chart:
    series = []
    for name, curve in measured.items():
        series.append(parts.line(curve, name))
        known = np.isfinite(expected[name])
        if known.any():
            x = np.array(WIDTHS)[known]
            series.append(Series(f"{name}, theory", "theory", "line", x, expected[name][known]))
    return Chart(title, parts.AXIS, axis, series, parts.ends(measured))
