"""From numbers with standard errors to a verdict, and the errors of a variance and of a line.

One rule for every claim that is a matter of chance: what lies within three standard errors of
theory confirms it, what lies beyond five refutes it, and between the two more samples are needed.
Three alone would refute a true claim once in 370 looks; five does so once in two million.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from levelhead.lab.claim import Verdict

__all__ = ["BEYOND", "WITHIN", "Line", "judged", "line", "log_variance", "median"]

WITHIN, BEYOND = 3.0, 5.0  # standard errors


def judged(errors: Iterable[float]) -> Verdict:
    """The verdict on distances from theory, in standard errors."""
    furthest = max(abs(error) for error in errors)
    if furthest <= WITHIN:
        return "confirmed"
    return "undecided" if furthest <= BEYOND else "refuted"


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
    at, seen, weight = (np.asarray(part, np.float64) for part in (x, y, errors))
    weight = weight**-2.0
    design = np.stack([np.ones_like(at), at], -1)
    covariance = np.linalg.inv(design.T @ (design * weight[:, None]))
    intercept, slope = covariance @ (design.T @ (weight * seen))
    intercept_error, slope_error = np.sqrt(np.diag(covariance))
    return Line(float(slope), float(intercept), float(slope_error), float(intercept_error))
