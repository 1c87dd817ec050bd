"""Why the root and not d_k itself: three statistics against the width, a line for each divisor."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from levelhead.lab import sweep
from levelhead.lab.experiment import Setting, divided
from levelhead.lab.figure import Axis, Chart, Fact, Figure, Series

DEPENDS = ("divide", "keys")
LINES = ("none", "sqrt", "d_k", "width")

Theory = Callable[[int, str, float], NDArray[np.float64]]


def figure(setting: Setting) -> Figure:
    shown = dict.fromkeys((*LINES, setting.divide))  # the reader's own, if it is a power
    found = {one: sweep.curves(setting.keys, setting.seed, one, setting.power) for one in shown}
    n = setting.keys
    charts = (
        _chart("Entropy", "H/ln n", "entropy", setting, found, sweep.entropy_theory),
        _chart("Largest weight", "top-1 weight", "top1", setting, found, None),
        _chart("Gradient that passes", "‖J‖_F, J = diag(p) - p pᵀ", "jacobian", setting, found, sweep.jacobian_theory),
    )
    mine = found[setting.divide]["entropy"]
    own = divided(setting.divide, setting.power)
    return Figure(
        "root",
        "Why the root, and not d_k?",
        charts,
        setting.python("root"),
        facts=(
            Fact(f"H/ln n at d_k = 1, {own}", mine.mean[0], "live", mine.stderr[0]),
            *(
                Fact(
                    f"H/ln n at d_k = 4096, {divided(one, setting.power)}",
                    curves["entropy"].mean[-1],
                    "live",
                    curves["entropy"].stderr[-1],
                )
                for one, curves in found.items()
            ),
            Fact("weight of each key in a flat row", 1 / n, "theory", formula="1/n"),
            Fact("few keys take all from σ of", math.sqrt(2 * math.log(n)), "theory", formula="√(2 ln n)"),
        ),
        note="Only a divisor that grows like √d_k leaves rows as they are, however wide the head "
        "is. Undivided they collapse onto one key; divided by d_k they become flat. √(8 d_k), "
        "the root of a model's width with 8 heads, is constant too, but flatter. Bands are "
        "two standard errors.",
    )


def _chart(
    title: str, unit: str, what: str, setting: Setting, found: dict[str, dict[str, sweep.Curve]], theory: Theory | None
) -> Chart:
    series = []
    for one, curves in found.items():
        curve, name = curves[what], divided(one, setting.power)
        series.append(curve.line(name))
        if theory is not None:
            expected = theory(setting.keys, one, setting.power)
            known = np.isfinite(expected)
            if known.any():
                x = np.array(sweep.WIDTHS)[known]
                series.append(Series(f"{name}, theory", "theory", "line", x, expected[known]))
    about = "; ".join(f"{divided(one, setting.power)}: {curves[what].ends()}" for one, curves in found.items())
    return Chart(title, sweep.AXIS, Axis(unit), series, about)
