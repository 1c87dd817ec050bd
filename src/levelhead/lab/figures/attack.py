"""Attack the assumption: queries and keys that are correlated, and weights that have grown.

√d_k is right for independent entries of variance 1. Here key j of n shares a part of its query: their
entries have correlation ρ_j, spread evenly from -ρ to ρ, so that q·k_j is about ρ_j d_k and grows
like d_k. Entries have standard deviation `sigma`, and `growth` multiplies W_Q and W_K, so q and k.
Each cure is the core's own option. A level is a description: sharp heads can be right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

import levelhead as lh
from levelhead.lab import experiment, sweep
from levelhead.lab.experiment import Setting, normals, scale_of, wrong
from levelhead.lab.figure import Axis, Chart, Fact, Figure, Gauge, Series
from levelhead.lab.figures import parts
from levelhead.stats import Rows

DEPENDS = ("d_k", "divide", "keys")
CURES = ("none", "1/d_k", "qk-norm", "softcap")
_NUMBERS, _MOST = 2**20, 8  # drawn for all keys of the rows, but for one row; rows
_PAIRS = 1024
_WIDTHS = sweep.WIDTHS[::2]  # 1, 4, … 4096
_RANGES = {"sigma": (0.25, 4.0), "rho": (0.0, 1.0), "growth": (0.5, 8.0), "cap": (1.0, 100.0)}

Array = NDArray[Any]


@dataclass(frozen=True)
class Attack:
    """What is done to queries and keys, and against it."""

    sigma: float
    rho: float
    growth: float
    cure: str
    cap: float

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            real = isinstance(value, int | float) and not isinstance(value, bool)
            if not (real and low <= value <= high):
                raise wrong(name, f"a number from {low:g} to {high:g}", value)
        if self.cure not in CURES:
            raise wrong("cure", f"one of {', '.join(CURES)}", self.cure)

    @property
    def variance(self) -> float:
        """What logits are multiplied by, beside the scale: queries and keys have this variance."""
        return (self.sigma * self.growth) ** 2

    def options(self, cure: str, scale: float, d_k: int) -> dict[str, Any]:
        """How the core is asked for a cure."""
        if cure == "1/d_k":
            return {"scale": scale_of("d_k", d_k)}
        if cure == "qk-norm":  # rows of norm √d_k, then divided by √d_k: √d_k cos(q, k)
            return {"scale": "cosine"}
        return {"scale": scale} | ({"softcap": float(self.cap)} if cure == "softcap" else {})


def figure(
    setting: Setting, *, sigma: float = 1.0, rho: float = 0.5, growth: float = 1.0,
    cure: str = "none", cap: float = 30.0,
) -> Figure:  # fmt: skip
    attack = Attack(sigma, rho, growth, cure, cap)
    q, k = _rows(setting.keys, setting.seed, attack)
    gauges = tuple(
        parts.gauge_of(_named(one, attack), _observed(q, k, setting, attack, one)) for one in CURES
    )
    histogram, facts = _logits(setting, attack)
    options = attack.options(cure, setting.scale, setting.d_k)
    one_q, one_k = (x[0, 0, :, : setting.d_k] for x in (q, k))
    weights = experiment.weights(one_q, one_k, **options)[0]
    verdict = _verdict(gauges)
    return Figure(
        "attack",
        "Attack the assumption",
        (
            histogram,
            parts.row_chart(weights, "One row", keys="key, by its correlation with the query"),
            _widths(q, k, setting, attack),
        ),
        setting.python("attack", sigma=sigma, rho=rho, growth=growth, cure=cure, cap=cap),
        facts=facts,
        gauges=gauges,
        note=f"{verdict} Correlations of a query with its keys are spread evenly from -ρ to ρ; the "
        "histogram holds pairs of correlation ρ.",
        extra={"verdict": verdict, "cure": cure},
    )


def _rows(keys: int, seed: int, attack: Attack) -> tuple[Array, Array]:
    """Queries (rows, 1, 1, widest) and the keys of each (rows, 1, keys, widest)."""
    q, noise = _drawn(keys, seed)
    rho = np.linspace(-attack.rho, attack.rho, keys, dtype=np.float32)[:, None]
    size = np.float32(math.sqrt(attack.variance))
    k = noise * (size * np.sqrt(1 - rho**2))
    k += q * (size * rho)
    return q * size, k


@lru_cache(maxsize=4)
def _drawn(keys: int, seed: int) -> tuple[Array, Array]:
    widest = sweep.WIDTHS[-1]
    rows = min(_MOST, max(1, _NUMBERS // (keys * widest)))
    shape = (rows, 1, 1, widest), (rows, 1, keys, widest)
    return normals(seed, "attack queries", *shape[0]), normals(seed, "attack keys", *shape[1])


def _observed(q: Array, k: Array, setting: Setting, attack: Attack, cure: str) -> Rows:
    """The rows of heads as wide as the setting says: the first columns."""
    d_k = setting.d_k
    options = attack.options(cure, setting.scale, d_k)
    return lh.observe(q[..., :d_k], k[..., :d_k], **options).rows


def _logits(setting: Setting, attack: Attack) -> tuple[Chart, tuple[Fact, ...]]:
    """Pairs of correlation ρ: their logits, and what theory says of them.

    s = q·k · scale has mean ρ d_k v · scale and variance (1 + ρ²) d_k v² · scale², v = σ² growth².
    """
    d_k, rho = setting.d_k, np.float32(attack.rho)
    pairs = Setting(d_k=d_k, seed=setting.seed)
    q, k = (x[:_PAIRS] for x in experiment.pairs(pairs))
    k = rho * q + np.sqrt(1 - rho**2) * k
    size = np.float32(math.sqrt(attack.variance))
    options = attack.options(attack.cure, setting.scale, d_k)
    s = experiment.logits(q * size, k * size, **options)
    found = parts.mean(s), parts.spread(s) if s.std() > 0 else parts.Spread(0.0, 0.0)
    (mean, error), spread = found
    facts = [
        Fact("mean logit of such pairs", mean, "live", error),
        Fact("their spread", spread.sigma, "live", spread.stderr),
    ]
    middle, deviation, theory = mean, spread.sigma, []
    if attack.cure in ("none", "1/d_k"):
        factor = attack.variance * options["scale"]
        middle, deviation = attack.rho * d_k * factor, math.sqrt((1 + attack.rho**2) * d_k) * factor
        facts.insert(1, Fact("mean in theory", middle, "theory", formula="ρ d_k σ² growth² · scale"))
        theory = [deviation]
    _, middles, density = parts.histogram(s, middle, deviation)
    series = [Series("measured", "live", "bars", middles, density)]
    for one in theory:
        curve = parts.normal(middles, middle, one)
        series.append(Series("normal law of this mean and variance", "theory", "line", middles, curve))
    about = f"{s.size} logits, mean {mean:.3g}, standard deviation {spread.sigma:.3g}"
    title = f"Logits of pairs of correlation {attack.rho:g}"
    return Chart(title, Axis("logit s"), Axis("density"), series, about), tuple(facts)


def _widths(q: Array, k: Array, setting: Setting, attack: Attack) -> Chart:
    """H/ln n of the same rows against d_k, for every cure."""
    log, found = math.log(setting.keys), {}
    for cure in CURES:
        rows = [
            _observed(q, k, Setting(d_k, setting.divide, setting.power, setting.keys), attack, cure)
            for d_k in _WIDTHS
        ]
        found[_named(cure, attack)] = sweep.curve(np.array([x.entropy[:, 0] / log for x in rows]))
    series = [curve.line(name, _WIDTHS) for name, curve in found.items()]
    about = "; ".join(f"{name}: {curve.ends()}" for name, curve in found.items())
    return Chart("Entropy against d_k", sweep.AXIS, Axis("H/ln n", range=(0.0, 1.0)), series, about)


def _named(cure: str, attack: Attack) -> str:
    words = {"none": "no cure", "qk-norm": "QK-norm", "softcap": f"softcap at {attack.cap:g}"}
    return words.get(cure, cure)


def _verdict(gauges: tuple[Gauge, ...]) -> str:
    """Which cures bring the bubble back to the middle."""
    uncured, *cured = gauges
    if uncured.level == "level":
        return "Level without a cure."
    back = [gauge.label for gauge in cured if gauge.level == "level"]
    said = f"{uncured.level.capitalize()} without a cure; "
    if not back:
        others = ", ".join(f"{gauge.label} {gauge.level}" for gauge in cured)
        return f"{said}no cure brings the level back here ({others})."
    return f"{said}{' and '.join(back)} bring{'s' * (len(back) == 1)} the level back."
