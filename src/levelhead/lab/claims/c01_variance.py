"""C1: the variance of a dot product is its length. Over d_k, for entries of three shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead.lab.claim import Claim, Outcome, Params, Plot, Tell, UndecidedError
from levelhead.lab.measure import pair_logits
from levelhead.lab.settings import numbers, whole, within
from levelhead.lab.verdict import judged, line, log_variance

DERIVATION = """\
q·k = Σ qᵢkᵢ has d_k terms. Entries are independent with mean 0 and variance 1, so E[qᵢkᵢ] =
E[qᵢ] E[kᵢ] = 0 and Var(qᵢkᵢ) = E[qᵢ²] E[kᵢ²] = 1. Different terms are uncorrelated, so
variances add: Var(q·k) = d_k, and the standard deviation is √d_k. No shape of the entries is
assumed. In logarithms: ln Var = 0 + 1 · ln d_k. The error of each ln Var is known: with E[x⁴] =
κ, q·k has excess kurtosis (κ² − 3)/d_k, so se(ln s²) = √((2 + (κ² − 3)/d_k)/n) for n pairs."""

# Mean 0, variance 1, and the fourth moment κ.
SHAPES: dict[str, tuple[Callable[[np.random.Generator, Any], NDArray[Any]], float]] = {
    "normal": (lambda random, size: random.standard_normal(size, np.float32), 3.0),
    "uniform": (lambda random, size: random.random(size, np.float32) * 12**0.5 - 3**0.5, 1.8),
    "laplace": (lambda random, size: random.laplace(0, 0.5**0.5, size), 6.0),
}
MOST = 1 << 22  # entries drawn at a time
PRECISE = 0.02  # standard error of a slope above which the claim is undecided


def experiment(params: Params, seed: int, tell: Tell) -> Outcome:
    widths = numbers("d_k", params["d_k"], 1, 1 << 16, least=3)
    samples = whole("samples", params["samples"], 4, 1 << 24)
    shared = within("shared", params["shared"], 0.0, 1.0)
    random = np.random.default_rng(seed)
    fits, variances, errors = {}, {}, {}
    for number, (name, (draw, kappa)) in enumerate(SHAPES.items()):
        log_variances = []
        for d_k in widths:
            tell((number + math.log2(d_k) / 16) / len(SHAPES), f"{name} entries, d_k = {d_k}")
            products = _products(random, draw, samples, d_k, shared)
            log_variances.append(log_variance(products, (kappa**2 - 3) / d_k))
        logs, errors[name] = (list(part) for part in zip(*log_variances, strict=True))
        variances[name] = np.exp(logs)
        fits[name] = line(np.log(widths), logs, errors[name])
    if max(fit.slope_error for fit in fits.values()) > PRECISE:
        raise UndecidedError(f"{samples} samples leave the slope uncertain; set samples higher")
    return Outcome(
        theory={"slope": dict.fromkeys(SHAPES, 1.0), "intercept": dict.fromkeys(SHAPES, 0.0)},
        measured={
            "slope": {name: fit.slope for name, fit in fits.items()},
            "intercept": {name: fit.intercept for name, fit in fits.items()},
        },
        stderr={
            "slope": {name: fit.slope_error for name, fit in fits.items()},
            "intercept": {name: fit.intercept_error for name, fit in fits.items()},
        },
        verdict=judged(
            away
            for fit in fits.values()
            for away in ((fit.slope - 1) / fit.slope_error, fit.intercept / fit.intercept_error)
        ),
        details={"d_k": widths, "variance": variances, "log_error": errors},
    )


def _products(
    random: np.random.Generator,
    draw: Callable[[np.random.Generator, Any], NDArray[Any]],
    samples: int,
    d_k: int,
    shared: float,
) -> NDArray[Any]:
    """q·k of independent pairs. `shared` is the part of an entry's variance that all entries of
    its vector have in common: above 0 the claim's assumption is broken."""
    parts = []
    for begin in range(0, samples, MOST // d_k):
        size = (2, min(MOST // d_k, samples - begin), d_k)
        q, k = draw(random, size)
        if shared:
            common = draw(random, (2, size[1], 1))
            q, k = (1 - shared) ** 0.5 * np.stack([q, k]) + shared**0.5 * common
        parts.append(pair_logits(q, k, "none"))
    return np.concatenate(parts).astype(np.float64)


CLAIM = Claim(
    id="C1",
    claim="If q and k have independent entries of mean 0 and variance 1, then Var(q·k) = d_k.",
    derivation=DERIVATION,
    criterion=(
        "A line through ln Var(q·k) over ln d_k, for normal, uniform and Laplace entries: "
        "confirmed if every slope is within 3 standard errors of 1 and every intercept within 3 "
        "of 0; refuted if one is beyond 5; undecided between, or if a slope's standard error "
        "exceeds 0.02."
    ),
    expected="confirmed",
    quick={"d_k": [2**n for n in range(13)], "samples": 4096, "shared": 0.0},
    full={"samples": 65536},
    experiment=experiment,
    plots=(
        Plot(
            "Variance of q·k",
            "d_k",
            "Var(q·k)",
            {"": ("details", "variance")},
            along=("details", "d_k"),
            theory={"theory: d_k": ("details", "d_k")},
            log="xy",
        ),
    ),
)
