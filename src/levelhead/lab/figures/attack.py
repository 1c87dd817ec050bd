"""Attack the assumption: queries and keys that are correlated, and weights that have grown.

√d_k is right for independent entries of variance 1. Here key j of n shares a part of its query:
their entries have correlation ρ_j, spread evenly from -ρ to ρ, so that q·k_j is about ρ_j d_k and
grows like d_k. Entries have standard deviation `sigma`; `growth` multiplies W_Q and W_K, so both
q and k. Each cure is the core's own option. A level is a description: sharp heads can be right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead.attention import observe
from levelhead.diagnosis.diagnose import diagnose
from levelhead.lab import measure, theory
from levelhead.lab.figure import Axis, Chart, Fact, Figure, Gauge, Series
from levelhead.lab.figures import parts
from levelhead.lab.measure import WIDTHS, Setting, clustered_curve, factor_of, normals
from levelhead.lab.parameters import CURES, check
from levelhead.observation import Observation
from levelhead.weights import weights

NEEDS = ("d_k", "scale", "power", "keys", "seed", "sigma", "rho", "growth", "cure", "cap")
CLAIMS = ("C9", "C9a", "C11")
_NUMBERS, _MOST = 2**20, 8  # drawn for all keys of the rows, but for one row; rows
_PAIRS = 1024
_FRAME = (-40.0, 40.0)  # of the histogram: a cap of 30 is inside
PINNED = "softcap saturated"  # the finding where a cap holds logits instead of shaping them
_BLOCK = 128  # keys
_WIDTHS = WIDTHS[::2]  # 1, 4, … 4096

Array = NDArray[Any]


@dataclass(frozen=True)
class Attack:
    """A change of queries and keys, and a cure for it."""

    sigma: float
    rho: float
    growth: float
    cure: str
    cap: float

    def __post_init__(self) -> None:
        check(**vars(self))

    @property
    def variance(self) -> float:
        """What logits are multiplied by, beside the scale: queries and keys have this variance."""
        return (self.sigma * self.growth) ** 2

    def options(self, cure: str, factor: float, d_k: int) -> dict[str, Any]:
        """The options of `attention` for a cure."""
        if cure == "1/d_k":
            return {"scale": factor_of("1/d_k", d_k)}
        if cure == "qk-norm":  # rows of norm √d_k, then divided by √d_k: √d_k cos(q, k)
            return {"scale": "cosine"}
        return {"scale": factor} | ({"softcap": float(self.cap)} if cure == "softcap" else {})


def figure(
    setting: Setting,
    *,
    sigma: float = 1.0,
    rho: float = 0.5,
    growth: float = 1.0,
    cure: str = "none",
    cap: float = 30.0,
) -> Figure:
    attack = Attack(sigma, rho, growth, cure, cap)
    q, k = _rows(setting.keys, setting.seed, attack)
    observed = _observed(q, k, setting, attack)
    pinned = any(one.kind == PINNED and one.severity == "warning" for one in diagnose(observed["softcap", setting.d_k]))
    gauges = tuple(parts.gauge_of(_named(one, attack, pinned), observed[one, setting.d_k].rows) for one in CURES)
    histogram, facts = _logits(setting, attack)
    options = attack.options(cure, setting.factor, setting.d_k)
    one_q, one_k = (x[0, 0, :, : setting.d_k] for x in (q, k))
    bars = weights(one_q, one_k, **options, together=parts.together(setting.keys))[0]
    verdict = _verdict(gauges, _named("softcap", attack, pinned) if pinned else None)
    return Figure(
        "attack",
        "Attack the assumption",
        (
            histogram,
            parts.row_chart(bars, setting.keys, "One row", axis="key, by its correlation with the query"),
            _widths(observed, setting.keys, attack),
        ),
        parts.code("attack", setting, sigma=sigma, rho=rho, growth=growth, cure=cure, cap=cap),
        facts=facts,
        gauges=gauges,
        note=f"{verdict} Correlations of a query with its keys are spread evenly from -ρ to ρ; the "
        "histogram holds pairs of correlation ρ.",
        extra={"verdict": verdict, "cure": cure, "pinned": pinned},
    )


def _rows(keys: int, seed: int, attack: Attack) -> tuple[Array, Array]:
    """Queries (rows, 1, 1, widest) and the keys of each (rows, 1, keys, widest)."""
    q, noise = _drawn(keys, seed)
    rho = np.linspace(-attack.rho, attack.rho, keys, dtype=np.float32)[:, None]
    size = np.float32(math.sqrt(attack.variance))
    k = noise * (size * np.sqrt(1 - rho**2))
    for i in range(0, keys, _BLOCK):  # so that what is added stays in the cache
        k[..., i : i + _BLOCK, :] += q * (size * rho[i : i + _BLOCK])
    return q * size, k


@lru_cache(maxsize=2)  # up to 70 MB each
def _drawn(keys: int, seed: int) -> tuple[Array, Array]:
    widest = WIDTHS[-1]
    rows = min(_MOST, max(1, _NUMBERS // (keys * widest)))
    shape = (rows, 1, 1, widest), (rows, 1, keys, widest)
    return normals(seed, "attack queries", *shape[0]), normals(seed, "attack keys", *shape[1])


def _observed(q: Array, k: Array, setting: Setting, attack: Attack) -> dict[tuple[str, int], Observation]:
    """The rows under each cure, for the reader's d_k and those of the curve: the first columns."""
    rows = {}
    for d_k in {setting.d_k, *_WIDTHS}:
        factor = factor_of(setting.scale, d_k, setting.power)
        for cure in CURES:
            options = attack.options(cure, factor, d_k)
            rows[cure, d_k] = observe(q[..., :d_k], k[..., :d_k], **options)
    return rows


def _logits(setting: Setting, attack: Attack) -> tuple[Chart, tuple[Fact, ...]]:
    """Logits of pairs of correlation ρ, under the cure that was chosen."""
    s = _pairs(setting, attack)
    (mean, error), spread, law = parts.mean(s), parts.spread(s), _law(setting, attack)
    middle, deviation = law or (mean, spread.sigma)
    _, middles, density = parts.histogram(s, *_seen(middle, deviation))
    outside = parts.outside(s, _FRAME, density)
    series = [Series("measured", "live", "bars", middles, density)]
    facts = [
        Fact("mean logit of such pairs", mean, "live", error),
        Fact("their spread", spread.sigma, "live", spread.stderr),
    ]
    if law:
        curve = theory.normal_density(middles, *law)
        series.append(Series("normal law", "theory", "line", middles, curve))
        facts += [
            Fact("mean in theory", law[0], "theory", formula="ρ d_k σ² growth² · scale"),
            Fact("spread in theory", law[1], "theory", formula="√((1 + ρ²) d_k) σ² growth² · scale"),
        ]
    about = f"{s.size} logits, mean {mean:.3g}, standard deviation {spread.sigma:.3g}{parts.beyond(outside, _FRAME[1])}"
    title = f"Logits of pairs of correlation {attack.rho:g}"
    axes = Axis("logit s", range=_FRAME), Axis("density", range=parts.DENSITY)
    return Chart(title, *axes, series, about, outside), tuple(facts)


def _seen(middle: float, deviation: float) -> tuple[float, float]:
    """The middle and the deviation of bins for what the frame shows of such logits."""
    low, high = (min(max(middle + side * parts.REACH * deviation, _FRAME[0]), _FRAME[1]) for side in (-1, 1))
    return (
        ((low + high) / 2, (high - low) / (2 * parts.REACH))
        if high > low
        else (sum(_FRAME) / 2, _FRAME[1] / parts.REACH)
    )


def _pairs(setting: Setting, attack: Attack) -> Array:
    rho = np.float32(attack.rho)
    q, k = (x[:_PAIRS] for x in measure.pairs(setting))
    k = rho * q + np.sqrt(1 - rho**2) * k
    size = np.float32(math.sqrt(attack.variance))
    options = attack.options(attack.cure, setting.factor, setting.d_k)
    return measure.pair_logits(q * size, k * size, **options)


def _law(setting: Setting, attack: Attack) -> tuple[float, float] | None:
    """Mean and deviation of their logits; None where a cure bends them.

    A term q_i k_i has mean ρv and variance (1 + ρ²)v², v the variance of the entries.
    """
    options = attack.options(attack.cure, setting.factor, setting.d_k)
    if attack.cure not in ("none", "1/d_k"):
        return None
    factor = attack.variance * options["scale"]
    deviation = math.sqrt((1 + attack.rho**2) * setting.d_k) * factor
    return attack.rho * setting.d_k * factor, deviation


def _widths(observed: dict[tuple[str, int], Observation], keys: int, attack: Attack) -> Chart:
    """H/ln n of the same rows against d_k, for every cure."""
    curves = {
        _named(cure, attack): clustered_curve(
            _WIDTHS, np.array([observed[cure, d_k].rows.entropy[:, 0] for d_k in _WIDTHS]) / math.log(keys)
        )
        for cure in CURES
    }
    series = [parts.line(curve, name) for name, curve in curves.items()]
    return Chart("Entropy against d_k", parts.AXIS, Axis("H/ln n", range=(0.0, 1.0)), series, parts.ends(curves))


def _named(cure: str, attack: Attack, pinned: bool = False) -> str:
    cap = f"softcap at {attack.cap:g}{', pinned' * pinned}"
    words = {"none": "no cure", "qk-norm": "QK-norm", "softcap": cap}
    return words.get(cure, cure)


def _verdict(gauges: tuple[Gauge, ...], pinned: str | None) -> str:
    """Which cures bring the bubble back to the middle; `pinned` names the one that only holds logits at its cap."""
    uncured, *cured = gauges
    held = " The softcap is no cure here: the largest logits are pinned at the cap, where tanh is flat. Their keys "
    held += f"cannot be told apart, and pass next to no gradient; diagnose warns of it: “{PINNED}”."
    more = held if pinned else ""
    if uncured.level == "level":
        return f"Level without a cure.{more}"
    back = [gauge.label for gauge in cured if gauge.level == "level" and gauge.label != pinned]
    first = f"{uncured.level.capitalize()} without a cure; "
    if not back:
        others = ", ".join(f"{gauge.label} {gauge.level}" for gauge in cured if gauge.label != pinned)
        return f"{first}no cure brings the level back here ({others}).{more}"
    return f"{first}{' and '.join(back)} bring{'s' * (len(back) == 1)} the level back.{more}"
