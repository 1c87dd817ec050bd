"""Why the root and not d_k itself: three statistics against the width, a line for each divisor."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from levelhead.lab import sweep
from levelhead.lab.experiment import Setting, divisor
from levelhead.lab.figure import Axis, Chart, Fact, Figure, Series

DEPENDS = ("divide", "keys")
LINES = ("none", "sqrt", "d_k", "width")
_WIDTH = Axis("d_k", log=True, range=(1.0, 4096.0))

Theory = Callable[[int, str, float], NDArray[np.float64]]


def figure(setting: Setting) -> Figure:
    shown = dict.fromkeys((*LINES, setting.divide))  # the reader's own, if it is a power
    found = {
        one: sweep.curves(setting.keys, setting.seed, one, setting.power) for one in shown
    }
    n = setting.keys
    charts = (
        _chart("Entropy", "H/ln n", "entropy", setting, found, sweep.entropy_theory),
        _chart("Largest weight", "top-1 weight", "top1", setting, found, None),
        _chart("Gradient that passes", "‖J‖_F, J = diag(p) - p pᵀ", "jacobian", setting, found,
               sweep.jacobian_theory),
    )  # fmt: skip
    mine = found[setting.divide]["entropy"]
    steepest = {one: np.ptp(curves["entropy"].mean) for one, curves in found.items()}
    return Figure(
        "root",
        "Why the root, and not d_k?",
        charts,
        setting.python("root"),
        facts=(
            *(
                Fact(f"H/ln n at d_k = {d_k}, divided by {divisor(setting.divide, setting.power)}",
                     mine.mean[i], "live", mine.stderr[i])
                for i, d_k in ((0, 1), (6, 64), (12, 4096))
            ),
            *(
                Fact(f"change of H/ln n over all d_k, divided by {divisor(one, setting.power)}",
                     change, "live")
                for one, change in steepest.items()
            ),
            Fact("flat: weight of each key", 1 / n, "theory", formula="1/n"),
            Fact("few keys take all from σ of", math.sqrt(2 * math.log(n)), "theory",
                 formula="√(2 ln n)"),
        ),
        note="Only divided by √d_k do rows stay as they are however wide the head is. Undivided they "
        "collapse onto one key; divided by d_k they become flat. √(8 d_k) is as level as √d_k, "
        "but flatter. Bands are two standard errors.",
    )  # fmt: skip


def _chart(
    title: str,
    unit: str,
    what: str,
    setting: Setting,
    found: dict[str, dict[str, sweep.Curve]],
    theory: Theory | None,
) -> Chart:
    series = []
    for one, curves in found.items():
        curve, name = curves[what], f"divided by {divisor(one, setting.power)}"
        low, high = curve.band
        series.append(
            Series(name, "live", "line", sweep.WIDTHS, curve.mean, low=low, high=high)
        )
        if theory is not None:
            expected = theory(setting.keys, one, setting.power)
            known = np.isfinite(expected)
            if known.any():
                x = np.array(sweep.WIDTHS)[known]
                series.append(Series(f"{name}, theory", "theory", "line", x, expected[known]))
    about = "; ".join(
        f"divided by {divisor(one, setting.power)} from {curves[what].mean[0]:.3g} at d_k 1 "
        f"to {curves[what].mean[-1]:.3g} at 4096"
        for one, curves in found.items()
    )
    return Chart(title, _WIDTH, Axis(unit), series, about)
