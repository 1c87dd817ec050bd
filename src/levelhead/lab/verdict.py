"""From numbers with standard errors to a verdict.

Three rules, by what a claim rests on:

- A few numbers, each with a known error (C1, C3): within three standard errors of theory confirms, beyond five refutes,
  and between them the claim is undecided (`judged`). Three alone would refute a true claim once in 370 measurements;
  five does so once in two million.
- Curves of dozens of points (C5 and C8 to C13): within four standard errors at every point, or a stated share of theory
  (`agree`, `shares_agree`), since one point in dozens is beyond three by chance.
- Trainings compared by seed (C7, C7a, C12, C16): 95 % intervals of Student's t over the seeds (`levelhead.lab.seeds`).

Claims whose numbers are not random (C1a, C4, C6) compare with a stated tolerance.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from levelhead.lab.claim import Verdict
from levelhead.lab.measure import Curve

WITHIN, BEYOND = 3.0, 5.0  # standard errors, where a claim rests on a few numbers
BOUND = 4.0  # standard errors, where it rests on dozens


def judged(errors: Iterable[float]) -> Verdict:
    """The verdict on distances from theory, in standard errors."""
    furthest = max(abs(error) for error in errors)
    if furthest <= WITHIN:
        return "confirmed"
    return "undecided" if furthest <= BEYOND else "refuted"


def agree(measured: Curve, theory: ArrayLike, *, relative: float = 0.0) -> bool:
    """Whether every point is within BOUND standard errors of theory, plus a share of it."""
    wanted = np.asarray(theory, np.float64)
    tolerance = BOUND * np.asarray(measured.stderr) + relative * np.abs(wanted)
    return bool(np.all(np.abs(np.asarray(measured.y) - wanted) <= tolerance))


def shares_agree(measured: Curve, theory: Sequence[float], rows: int) -> bool:
    """The same for shares of so many rows: a share that was measured as 0 has an error, too."""
    wanted = np.asarray(theory, np.float64)
    by_chance = np.sqrt(wanted * (1 - wanted) / rows)
    tolerance = BOUND * np.maximum(measured.stderr, by_chance) + 1 / rows
    return bool(np.all(np.abs(np.asarray(measured.y) - wanted) <= tolerance))


def slope(measured: Curve) -> tuple[float, float]:
    """The exponent p of y ~ x^p with its standard error: a weighted line through logarithms."""
    errors = np.asarray(measured.stderr) / np.asarray(measured.y)
    fit = line(np.log(measured.x), np.log(measured.y), errors)
    return fit.slope, fit.slope_error


def log_variance(samples: NDArray[Any], excess: float | None = None) -> tuple[float, float]:
    """ln s² without its bias, and its standard error; excess kurtosis as known, else as measured.

    Var(s²) = σ⁴ (2 / (n − 1) + excess / n), hence se(ln s²) = √(2 / (n − 1) + excess / n),
    and E ln s² = ln σ² − se² / 2, both up to terms in 1/n².
    """
    n = len(samples)
    if excess is None:
        centred = samples - samples.mean()
        excess = float(np.mean(centred**4) / np.mean(centred**2) ** 2 - 3)
    variance = 2 / (n - 1) + excess / n
    return float(np.log(samples.var(ddof=1)) + variance / 2), float(np.sqrt(variance))


def median(samples: NDArray[Any]) -> tuple[float, float]:
    """The median and its standard error, whatever the distribution: ranks n/2 ± √n/2."""
    half = 0.5 / np.sqrt(len(samples))
    low, middle, high = np.quantile(samples, [0.5 - half, 0.5, 0.5 + half])
    return float(middle), float((high - low) / 2)


@dataclass(frozen=True)
class Line:
    slope: float
    intercept: float
    slope_error: float
    intercept_error: float


def line(x: ArrayLike, y: ArrayLike, errors: ArrayLike) -> Line:
    """Weighted least squares: y = intercept + slope · x, each y with a known standard error."""
    xs, ys, weight = (np.asarray(part, np.float64) for part in (x, y, errors))
    weight = weight**-2.0
    design = np.stack([np.ones_like(xs), xs], -1)
    covariance = np.linalg.inv(design.T @ (design * weight[:, None]))
    intercept, slope = covariance @ (design.T @ (weight * ys))
    intercept_error, slope_error = np.sqrt(np.diag(covariance))
    return Line(float(slope), float(intercept), float(slope_error), float(intercept_error))
