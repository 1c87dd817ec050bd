"""What theory says of a softmax over random keys: expectations by quadrature, never by sampling.

For a given query q and normal keys, the n logits are independent normal numbers of standard
deviation σ = scale · |q|. With Z = Σ exp(s) and 1/Z^m = ∫ t^(m-1) exp(-tZ) dt / Γ(m), every
expectation becomes an integral over u = -ln t of a product over keys. Nothing here computes
attention: it is what the measurements of the core are laid beside.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

__all__ = ["Softmax", "expected_softmax", "jacobian", "over_queries", "overflowing", "softmax_of"]

Floats = NDArray[np.float64]

# Smooth integrands on even grids: the trapezoid rule is as good as exact at half a logit a step.
# The running integral behind the largest weight is not that lucky and wants finer steps.
_FINE, _COARSE = 0.2, 0.5  # logits
_REACH = 6.5  # standard deviations: 4e-11 of a normal distribution lies beyond
_NOTHING = 1e-12


@dataclass(frozen=True)
class Softmax:
    """Expected statistics of one row of weights."""

    entropy: float
    top1: float
    sum_p2: float
    sum_p3: float


@lru_cache(maxsize=1024)
def expected_softmax(std: float, keys: int) -> Softmax:
    """Of `keys` independent normal logits with this standard deviation.

    >>> round(expected_softmax(1.0, 256).entropy, 2)  # ln 256 - 1/2 = 5.05
    5.05
    """
    step = min(_FINE / max(std, 1e-9), 0.02)
    x = np.arange(-_REACH, _REACH + step, step)
    density = np.exp(-x * x / 2) * (step / math.sqrt(2 * math.pi))
    s = std * x
    # The largest of the logits is above `low`, all but surely; so nothing happens far below it.
    low = float(s[np.searchsorted(np.cumsum(density), _NOTHING ** (1 / keys))])
    u = np.arange(low - 4, float(s[-1]) + math.log(keys) + 25, _COARSE)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        w = np.exp(s - u[:, None])
        left = np.exp(-w) * density
        one = left.sum(-1)  # E exp(-w): what a key leaves
        others = one ** (keys - 1)
        # The integral up to x: half of the last step, all of those before.
        below = np.maximum(np.cumsum(left, -1) - left / 2, 0.0) ** (keys - 1)

        def total(moment: Floats) -> float:
            inner = np.where(left > 0, moment * left, 0.0).sum(-1)
            return float(keys * _COARSE * (inner * others).sum())

        log_z = low + float(_COARSE * (np.exp(-np.exp(low - u)) - others * one).sum())
        return Softmax(
            entropy=log_z - total(s * w),
            top1=float(keys * _COARSE * np.where(left > 0, w * left * below, 0.0).sum()),
            sum_p2=total(w * w),
            sum_p3=total(w**3) / 2,
        )


def over_queries(d_k: int, of_norm: Callable[[float], float]) -> float:
    """The mean of a function of |q| over normal queries: |q|² is chi-square with d_k degrees."""
    norms, shares = _norms(d_k)
    return float(sum(x * of_norm(r) for r, x in zip(norms.tolist(), shares.tolist(), strict=True)))


def softmax_of(d_k: int, keys: int, scale: float) -> Softmax:
    """Of one query against `keys` keys, all entries normal."""
    norms, shares = _norms(d_k)
    found = [expected_softmax(scale * r, keys) for r in norms.tolist()]

    def mean(name: str) -> float:
        return float(shares @ [getattr(one, name) for one in found])

    return Softmax(*(mean(name) for name in Softmax.__dataclass_fields__))


def jacobian(row: Softmax) -> float:
    """‖diag(p) - p pᵀ‖_F of mean moments: √(Σp² - 2Σp³ + (Σp²)²). Good where rows are alike."""
    return math.sqrt(max(row.sum_p2 - 2 * row.sum_p3 + row.sum_p2**2, 0.0))


def overflowing(d_k: int, keys: int, scale: float, limit: float) -> float:
    """The share of rows whose largest logit is above a limit: 1 - Φ(limit/σ)^n."""

    def share(norm: float) -> float:
        above = math.erfc(limit / (scale * norm) / math.sqrt(2)) / 2
        return -math.expm1(keys * math.log1p(-above))

    return min(over_queries(d_k, share), 1.0)


def _norms(d_k: int) -> tuple[Floats, Floats]:
    """Values of |q| and their shares.

    Even steps in ln |q|, whose density exp(d_k t - exp(2t)/2) is a bell of width 1/√(2 d_k) with a
    tail to the left, long where d_k is small.
    """
    width = 1 / math.sqrt(2 * d_k)
    steps = np.arange(-4.5 - 8 / (d_k * width), 4.5, 0.8)
    t = math.log(math.sqrt(d_k)) + steps * width
    log = d_k * t - np.exp(2 * t) / 2
    shares = np.exp(log - log.max())
    return np.exp(t), shares / shares.sum()
