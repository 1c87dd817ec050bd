"""C2: dot products spread with dimension. The notes' examples, and how much of them is dimension.

The examples are taken apart by drawing: entries of the smaller one in the larger dimension, entries
of the larger one in the smaller dimension, both with and without their means.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead.lab.claim import Claim, Outcome, Params, Plot, Tell, Verdict
from levelhead.lab.measure import pair_logits
from levelhead.lab.settings import numbers, whole
from levelhead.lab.verdict import WITHIN, log_variance, median

DERIVATION = """\
For independent entries of means µ and variances σ², Var(q·k) = d · (σq²σk² + µq²σk² + µk²σq²):
it grows with d. The notes' variances, 73.6 and 140,003 (the mean squared distance of three
numbers from their mean), differ by a factor of 1903. Dimension is 3/2 of it. The formula gives
the rest: larger entries 131.5 (one of them is 99), their means 1.19, and what remains, 8.1, is
which entry met which in three draws. Likewise the samples: with zero-mean normal entries q·k is
Laplace in 2-D, and of n samples the median extreme is σ² ln(n / ln 2), which is 23 for n = 1000
and σ = 1.78. The same entries in 5-D reach about 30. From −49 to 122 takes other entries:
larger, and with a mean, which makes q·k lean."""

TWO = np.array([[[1, 2], [2, 3]], [[1, 4], [5, 6]], [[8, 9], [0, 2]]], np.float64)
THREE = np.array([[[1, 2, 3], [3, 2, 1]], [[3, 4, 5], [6, 7, 8]], [[10, 99, 11], [8, 7, 6]]], np.float64)
PRODUCTS = ([8, 29, 18], [10, 86, 839])
VARIANCES = ("73.6", "140,003")  # as the notes print them
REACH, RANGE = 23.0, (-49.0, 122.0)  # samples in 2-D and in 5-D
OTHER = (2.15, 2.65)  # mean and std of normal entries that would give that range
MOSTLY = 0.5  # the share of a contrast from which it is mostly dimension
SELDOM = 0.05  # the share of draws below which entries do not explain a range
BINS = np.linspace(-40, 40, 81)


def experiment(params: Params, seed: int, tell: Tell) -> Outcome:
    dimensions = numbers("dimensions", params["dimensions"], 1, 4096, least=2)
    samples = whole("samples", params["samples"], 64, 1 << 22)
    draws = whole("draws", params["draws"], 20, 10_000)
    points = whole("points", params["points"], 2, 100_000)
    random = np.random.default_rng(seed)
    tell(0.0, "the notes' vectors")
    examples = [pair_logits(pairs[:, 0], pairs[:, 1], "none") for pairs in (TWO, THREE)]
    factors, factor_errors = _factors(random, samples)
    chance = examples[1].var() / examples[0].var() / math.prod(factors.values())
    tell(0.3, "the same entries in every dimension")
    grown = [_products(random, samples, d, params["scale"]) for d in dimensions]
    pairs = zip(grown, dimensions, strict=True)
    logs, errors = np.transpose([log_variance(x, 6 / d) for x, d in pairs])
    tell(0.6, "many draws of samples")
    ranges, range_errors, seldom = _ranges(random, draws, points)
    unit = np.exp(logs) / dimensions
    steps = np.diff(logs) / np.hypot(errors[1:], errors[:-1])
    share = math.log(factors["dimension"]) / math.log(chance * math.prod(factors.values()))
    reproduced = all(
        np.allclose(products, product, rtol=1e-12, atol=0) and _as_printed(products.var(), variance)
        for products, product, variance in zip(examples, PRODUCTS, VARIANCES, strict=True)
    )
    return Outcome(
        theory=_theory(dimensions),
        measured={
            "products": examples,
            "variance": [x.var() for x in examples],
            "factor due to": factors | {"which entry met which": chance},
            "share of dimension": share,
            "extremes": ranges,
            "5-D draws of the 2-D entries that reach 122": seldom,
            "variance / d, same entries": unit,
        },
        stderr={"factor due to": factor_errors, "extremes": range_errors, "variance / d, same entries": unit * errors},
        verdict=_verdict(reproduced, steps, share, seldom),
        details={
            "dimensions": dimensions,
            "bins": (BINS[1:] + BINS[:-1]) / 2,
            "histograms": {
                f"d = {d}": np.histogram(x, BINS, density=True)[0] for d, x in zip(dimensions, grown, strict=True)
            },
        },
    )


def _verdict(reproduced: bool, steps: NDArray[Any], share: float, seldom: float) -> Verdict:
    if not (reproduced and np.all(steps > WITHIN)):
        return "refuted"
    return "confirmed" if share >= MOSTLY and seldom >= SELDOM else "caveat"


def _as_printed(value: float, printed: str) -> bool:
    """Whether the notes' digits are this value's."""
    digits = len(printed.partition(".")[2])
    return f"{value:,.{digits}f}" == printed


def _theory(dimensions: list[int]) -> dict[str, Any]:
    (spread_2, whole_2), (spread_3, whole_3) = _per_dimension(TWO), _per_dimension(THREE)
    size, mean = spread_3 / spread_2, (whole_3 / whole_2) / (spread_3 / spread_2)
    dimension = THREE.shape[-1] / TWO.shape[-1]
    variances = [float(printed.replace(",", "")) for printed in VARIANCES]
    return {
        "products": PRODUCTS,
        "variance": variances,
        "factor due to": {"dimension": dimension, "size": size, "mean": mean},
        "share of dimension": math.log(dimension) / math.log(variances[1] / variances[0]),
        "extremes": {
            "2-D, zero-mean entries": REACH,
            "5-D, the same entries": None,
            "5-D, larger entries with a mean": RANGE,
        },
        "variance / d, same entries": [1.0] * len(dimensions),
    }


def _per_dimension(pairs: NDArray[Any]) -> tuple[float, float]:
    """Variance per dimension of an example's entries: without and with their means."""
    (q_mean, k_mean), (q_var, k_var) = pairs.mean((0, 2)), pairs.var((0, 2))
    spread = q_var * k_var
    return float(spread), float(spread + q_mean**2 * k_var + k_mean**2 * q_var)


def _factors(random: np.random.Generator, samples: int) -> tuple[dict[str, float], dict[str, float]]:
    """What dimension, size and mean of the entries do to the variance, one exchanged at a time."""
    d_2, d_3 = TWO.shape[-1], THREE.shape[-1]
    centred = [pairs - pairs.mean((0, 2), keepdims=True) for pairs in (TWO, THREE)]

    def spread(pairs: NDArray[Any], d: int) -> NDArray[Any]:
        q, k = (random.choice(part.ravel(), (samples, d)) for part in np.moveaxis(pairs, 1, 0))
        return np.array(log_variance(pair_logits(q, k, "none")))

    wider = spread(TWO, d_3), spread(TWO, d_2)
    larger = spread(centred[1], d_2), spread(centred[0], d_2)
    entries = spread(THREE, d_2), spread(TWO, d_2)
    dimension, size, both = (a[0] - b[0] for a, b in (wider, larger, entries))
    errors = [float(np.hypot(a[1], b[1])) for a, b in (wider, larger, entries)]
    logs = {"dimension": dimension, "size": size, "mean": both - size}
    factors = {name: math.exp(log) for name, log in logs.items()}
    relative = {"dimension": errors[0], "size": errors[1], "mean": math.hypot(*errors[1:])}
    return factors, {name: factors[name] * relative[name] for name in factors}


def _ranges(random: np.random.Generator, draws: int, points: int) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Median extremes of `points` samples, and how often the 2-D entries reach 122 in 5-D."""
    std = math.sqrt(REACH / math.log(points / math.log(2)))
    size = draws, points
    flat, deep = (_products(random, size, d, std**2) for d in (2, 5))
    mean, wide = OTHER
    leaning = _products(random, size, 5, wide**2, mean / wide)
    extremes = {
        "2-D, zero-mean entries": median(np.abs(flat).max(1)),
        "5-D, the same entries": median(np.abs(deep).max(1)),
        "5-D, larger entries with a mean": tuple(zip(median(leaning.min(1)), median(leaning.max(1)), strict=True)),
    }
    reached = float(np.mean(np.abs(deep).max(1) >= RANGE[1]))
    medians, errors = ({name: pair[part] for name, pair in extremes.items()} for part in (0, 1))
    return medians, errors, reached


def _products(
    random: np.random.Generator, size: int | tuple[int, ...], d: int, scale: float | str, mean: float = 0.0
) -> NDArray[Any]:
    """Scaled q·k of independent pairs with normal entries of variance 1."""
    q, k = mean + random.standard_normal((2, math.prod(np.atleast_1d(size)), d))
    return pair_logits(q, k, scale).reshape(size)


CLAIM = Claim(
    id="C2",
    claim="Dot products spread more in higher dimensions, as the notes' examples show.",
    derivation=DERIVATION,
    criterion=(
        "Refuted if the notes' products and variances do not come out to the digit, or if with "
        "the same entries the variance does not grow by more than 3 standard errors from each "
        "dimension to the next. Else confirmed if dimension is at least half of the examples' "
        "contrast, in logarithms, and the 2-D entries reach 122 in 5-D in at least 5 % of "
        "draws; else caveat."
    ),
    expected="caveat",
    quick={"dimensions": [1, 2, 3, 5, 16, 64], "samples": 65536, "draws": 400, "points": 1000, "scale": "none"},
    full={"samples": 1 << 18, "draws": 2000},
    experiment=experiment,
    plots=(
        Plot(
            "The same entries in more dimensions",
            "q·k",
            "density",
            {"": ("details", "histograms")},
            ("details", "bins"),
        ),
        Plot(
            "Variance per dimension",
            "d",
            "variance / d",
            {"same entries": ("measured", "variance / d, same entries")},
            along=("details", "dimensions"),
            log="x",
        ),
    ),
)
