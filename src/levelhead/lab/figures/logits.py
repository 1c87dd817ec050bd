"""The first panel: how far logits spread, and what that does to one attention row."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from levelhead.attention import observe
from levelhead.lab import measure, theory
from levelhead.lab.figure import Axis, Chart, Fact, Figure, Series
from levelhead.lab.figures import parts
from levelhead.lab.measure import Setting
from levelhead.weights import weights

NEEDS = ("d_k", "scale", "power", "keys", "seed")
CLAIMS = ("C1", "C2", "C3", "C4", "C5", "C8", "C8a")
SHOWN = 16.0  # to either side of 0: two standard deviations of undivided logits at d_k = 64


def figure(setting: Setting) -> Figure:
    queries, keys = measure.pairs(setting)
    s = measure.pair_logits(queries, keys, setting.factor)
    q, k = measure.row(setting)
    rows = observe(q, k, scale=setting.factor).rows
    bars = weights(q, k, setting.factor, together=parts.together(setting.keys))[0]
    sigma = math.sqrt(setting.d_k) * setting.factor
    measured = parts.spread(s)
    divisor = measure.divisor(setting.scale, setting.power)
    return Figure(
        "logits",
        "Logits, and the row they make",
        (_histogram(s, setting, sigma), parts.row_chart(bars, setting.keys, "One attention row")),
        parts.code("logits", setting),
        facts=(
            Fact("σ measured", measured.sigma, "live", measured.stderr),
            Fact("σ in theory", sigma, "theory", formula=f"√d_k / {divisor}"),
            Fact("pairs measured", s.size, "live"),
            *parts.row_facts(rows),
        ),
        gauges=(parts.gauge_of("this row", rows),),
        note=_note(setting, sigma),
    )


def _histogram(s: NDArray[np.float32], setting: Setting, sigma: float) -> Chart:
    edges, middles, density = parts.histogram(s, 0.0, sigma, SHOWN)
    live = Series("measured", "live", "bars", middles, density)
    law = Series("theory", "theory", "line", middles, theory.logit_density(edges, setting.d_k, setting.factor))
    frame = (-SHOWN, SHOWN)
    outside = parts.outside(s, frame, density)
    about = f"{s.size} logits of standard deviation {s.std():.3g}{parts.beyond(outside, SHOWN)}"
    axis, height = Axis("logit s = q·k / divisor", range=frame), Axis("density", range=parts.DENSITY)
    return Chart("Logits of random pairs", axis, height, (live, law), about, outside)


def _note(setting: Setting, sigma: float) -> str:
    law = (
        "Theory is the normal law, which a sum of so many products follows."
        if setting.d_k >= theory.NORMAL
        else "Theory is the exact law of a sum of d_k products: sharper than normal, with heavier "
        "tails, and the normal law as d_k grows."
    )
    if math.isclose(sigma, 1.0):
        return f"Divided by √d_k, logits spread by 1 at every d_k. {law}"
    return f"These logits spread by {sigma:.3g}; divided by √d_k they would spread by 1. {law}"
