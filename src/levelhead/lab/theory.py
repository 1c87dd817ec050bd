"""The theory of a softmax over random keys: expectations by quadrature, never by sampling.

For a given query q and normal keys, the n logits are independent normal numbers of standard deviation σ = factor · |q|.
With Z = Σ exp(s) and 1/Z^m = ∫ t^(m-1) exp(-tZ) dt / Γ(m), every expectation becomes an integral over u = -ln t of a
product over keys. Nothing here computes attention; measurements of the core are compared with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Smooth integrands on even grids: the trapezoid rule is as good as exact at half a logit a step. The running integral
# behind the largest weight needs finer steps.
_FINE, _COARSE = 0.2, 0.5  # logits
_REACH = 6.5  # standard deviations: 4e-11 of a normal distribution lies beyond
_NOTHING = 1e-12
NORMAL = 512  # d_k from which q·k is drawn as normal: its kurtosis is 3 + 6/d_k
# The table of `softmax_over`: σ from 68 (undivided at d_k = 4096, the longest queries) down by √2 a step.
_TABLE = 68.0 * 2.0 ** (-np.arange(29) / 2)[::-1]


@dataclass(frozen=True)
class Softmax:
    """Expected statistics of one row of weights."""

    entropy: float
    top1: float
    sum_p2: float
    sum_p3: float


@lru_cache(maxsize=1024)
def expected_softmax(std: float, keys: int, fine: float = _FINE) -> Softmax:
    """Of `keys` independent normal logits with this standard deviation; `fine` is the step in logits.

    >>> round(expected_softmax(1.0, 256).entropy, 2)  # ln 256 - 1/2 = 5.05
    5.05
    """
    step = min(fine / max(std, 1e-9), 0.02)
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


def softmax_of(d_k: int, keys: int, factor: float) -> Softmax:
    """Of one query against `keys` keys, all entries normal."""
    norms, shares = _norms(d_k)
    columns = zip(*(astuple(expected_softmax(factor * r, keys)) for r in norms.tolist()), strict=True)
    return Softmax(*(float(shares @ column) for column in columns))


def softmax_over(widths: Sequence[int], keys: int, factors: Sequence[float]) -> list[Softmax]:
    """`softmax_of` every width, from a table over σ instead of its own integrals: fast, and within 0.0005 of it."""
    rows = []
    for d_k, factor in zip(widths, factors, strict=True):
        norms, shares = _norms(d_k)
        rows.append(Softmax(*(shares @ _from_table(factor * norms, keys)).tolist()))
    return rows


def frobenius(sum_p2: Floats, sum_p3: Floats) -> Floats:
    """‖diag(p) - p pᵀ‖_F = √(Σp² - 2Σp³ + (Σp²)²)."""
    norm: Floats = np.sqrt(np.maximum(sum_p2 - 2 * sum_p3 + sum_p2**2, 0.0))
    return norm


def jacobian(row: Softmax) -> float:
    """‖J‖_F of mean moments. It is the root of a mean, not the mean of a root: good where rows are alike."""
    return float(frobenius(np.float64(row.sum_p2), np.float64(row.sum_p3)))


def normal_density(x: Floats, middle: float, deviation: float) -> Floats:
    """The density of N(middle, deviation²)."""
    density: Floats = np.exp(-(((x - middle) / deviation) ** 2) / 2)
    return density / (deviation * math.sqrt(2 * math.pi))


def logit_density(edges: Floats, d_k: int, factor: float) -> Floats:
    """The mean density of factor · q·k between neighbouring edges, q and k normal.

    Given q, q·k is normal with variance |q|², and |q|² is chi-square with d_k degrees: q·k is a mixture of normals.
    Wide heads have a narrow mixture, for which the normal density is close enough.
    """
    bounds = edges / factor
    if d_k >= NORMAL:
        return normal_density((bounds[1:] + bounds[:-1]) / 2, 0.0, math.sqrt(d_k)) / factor
    # r = |q| on a grid in ln r: its density there is r^d exp(-r²/2), up to a factor. Finer than `_norms`: Φ has a kink
    # at the scale of r where r is small.
    r = math.sqrt(d_k) * np.exp(np.linspace(-12.0 / math.sqrt(d_k), 4.0 / math.sqrt(d_k), 257))
    log = d_k * np.log(r) - r**2 / 2
    share = np.exp(log - log.max())
    share /= share.sum()
    below: Floats = share @ np.interp(bounds[None, :] / r[:, None], *_normal_table())
    return np.diff(below) / np.diff(edges)


def overflowing(d_k: int, keys: int, factor: float, limit: float) -> float:
    """The share of rows whose largest logit is above a limit: 1 - Φ(limit/σ)^n."""

    def share(norm: float) -> float:
        above = math.erfc(limit / (factor * norm) / math.sqrt(2)) / 2
        return -math.expm1(keys * math.log1p(-above))

    return min(over_queries(d_k, share), 1.0)


def _norms(d_k: int) -> tuple[Floats, Floats]:
    """Values of |q| and their shares.

    Even steps in ln |q|, whose density exp(d_k t - exp(2t)/2) is a bell of width 1/√(2 d_k) with a tail to the left,
    long where d_k is small.
    """
    width = 1 / math.sqrt(2 * d_k)
    steps = np.arange(-4.5 - 8 / (d_k * width), 4.5, 0.8)
    t = math.log(math.sqrt(d_k)) + steps * width
    log = d_k * t - np.exp(2 * t) / 2
    shares = np.exp(log - log.max())
    return np.exp(t), shares / shares.sum()


@lru_cache(maxsize=16)
def _table(keys: int) -> Floats:
    """Statistics (σ of _TABLE, four)."""
    return np.array([astuple(expected_softmax(std, keys, _COARSE)) for std in _TABLE.tolist()])


def _from_table(std: Floats, keys: int) -> Floats:
    """Statistics (σ, four), cubic in ln σ between four neighbours; constant below the table."""
    at = np.log(np.clip(std, _TABLE[0], _TABLE[-1]) / _TABLE[0]) / (math.log(2) / 2)
    first = np.clip(np.floor(at).astype(int) - 1, 0, len(_TABLE) - 4)
    t = at - first
    total = np.zeros((len(std), 4))
    for i in range(4):
        weight = np.prod([(t - j) / (i - j) for j in range(4) if j != i], axis=0)
        total += weight[:, None] * _table(keys)[first + i]
    return total


@cache
def _normal_table() -> tuple[Floats, Floats]:
    """x and Φ(x): NumPy has no erf, and steps of a thousandth of a deviation are fine enough."""
    xs = np.linspace(-6.0, 6.0, 12001)
    return xs, np.array([(1 + math.erf(x / math.sqrt(2))) / 2 for x in xs])
