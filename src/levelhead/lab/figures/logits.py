"""The hero: how far logits spread, and what that does to one attention row."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from levelhead.attention import observe
from levelhead.lab import experiment
from levelhead.lab.experiment import Setting
from levelhead.lab.figure import Axis, Chart, Fact, Figure, Series
from levelhead.lab.figures import parts

DEPENDS = ("d_k", "divide", "keys")
SHOWN = 16.0  # to either side of 0: two standard deviations of undivided logits at d_k = 64
_NORMAL = 512  # d_k from which a sum of products is normal to the eye: its kurtosis is 3 + 6/d_k


def figure(setting: Setting) -> Figure:
    queries, keys = experiment.pairs(setting)
    s = experiment.logits(queries, keys, setting.scale)
    q, k = experiment.row(setting)
    rows = observe(q, k, scale=setting.scale).rows
    shared = parts.together(setting.keys)
    bars = experiment.weights(q, k, setting.scale, together=shared)[0]
    sigma = math.sqrt(setting.d_k) * setting.scale
    measured = parts.spread(s)
    divisor = experiment.divisor(setting.divide, setting.power)
    return Figure(
        "logits",
        "Logits, and the row they make",
        (_histogram(s, setting, sigma), parts.row_chart(bars, setting.keys, "One attention row")),
        setting.python("logits"),
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
    theory = Series("theory", "theory", "line", middles, _law(edges / setting.scale, setting))
    share = float((np.abs(s) > SHOWN).mean())
    about = f"{s.size} logits of standard deviation {s.std():.3g}; {share:.0%} beyond ±{SHOWN:g}"
    axis = Axis("logit s = q·k / divisor", range=(-SHOWN, SHOWN))
    return Chart("Logits of random pairs", axis, Axis("density"), (live, theory), about)


def _law(edges: NDArray[np.float64], setting: Setting) -> NDArray[np.float64]:
    """Density of s in each bin, from the law of q·k between the edges of an undivided logit.

    Given q, q·k is normal with variance |q|², and |q|² is χ² with d_k degrees of freedom: so q·k is
    a mixture of normals. Wide heads have a narrow mixture, and the normal law will do.
    """
    width = np.diff(edges) * setting.scale
    d = setting.d_k
    if d >= _NORMAL:
        return parts.normal((edges[1:] + edges[:-1]) / 2, 0.0, math.sqrt(d)) / setting.scale
    # r = |q| on a grid in ln r: its density there is r^d exp(-r²/2), up to a factor.
    r = math.sqrt(d) * np.exp(np.linspace(-12.0 / math.sqrt(d), 4.0 / math.sqrt(d), 257))
    log = d * np.log(r) - r**2 / 2
    share = np.exp(log - log.max())
    share /= share.sum()
    below: NDArray[np.float64] = share @ _normal_below(edges[None, :] / r[:, None])
    return np.diff(below) / width


def _normal_below(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Φ(x), read off a table: NumPy has no erf, and a thousandth of a deviation is fine enough."""
    at, below = _TABLE
    return np.interp(x, at, below)


def _table() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    at = np.linspace(-6.0, 6.0, 12001)
    return at, np.array([(1 + math.erf(x / math.sqrt(2))) / 2 for x in at])


_TABLE = _table()


def _note(setting: Setting, sigma: float) -> str:
    law = (
        "Theory is the normal law, which a sum of so many products follows."
        if setting.d_k >= _NORMAL
        else "Theory is the exact law of a sum of d_k products: sharper than normal, with heavier "
        "tails, and the normal law as d_k grows."
    )
    if math.isclose(sigma, 1.0):
        return f"Divided by √d_k, logits spread by 1 at every d_k. {law}"
    return f"These logits spread by {sigma:.3g}; divided by √d_k they would spread by 1. {law}"
