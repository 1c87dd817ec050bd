"""The same heads made wider: what d_k from 1 to 4096 does to their rows, under any divisor.

The heads are drawn once, 4096 wide, and a narrower head is the first columns of a wide one: curves
are smooth, and their points are not independent of each other. Dot products come from the core and
are remembered; softmax statistics come from the core again, for each divisor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead.attention import observe
from levelhead.lab.experiment import normals, scale_of
from levelhead.lab.figure import Axis, Series

__all__ = ["AXIS", "WIDTHS", "Curve", "curve", "curves", "dot_products", "entropy_theory", "jacobian_theory"]

WIDTHS = tuple(2**i for i in range(13))  # 1 … 4096
ROWS = 8  # queries of a head
_NUMBERS = 2**22  # drawn for the keys of all heads, but for one head at least
_MOST = 12  # heads

AXIS = Axis("d_k", log=True, range=(1.0, float(WIDTHS[-1])))

Array = NDArray[Any]


@dataclass(frozen=True)
class Curve:
    """A mean over rows at every width, with its standard error."""

    mean: Array
    stderr: Array

    def line(self, name: str, widths: Sequence[int] = WIDTHS) -> Series:
        """The curve with a band of two standard errors to either side."""
        low, high = self.mean - 2 * self.stderr, self.mean + 2 * self.stderr
        if not np.isfinite(low).all():  # a single row has no error
            return Series(name, "live", "line", widths, self.mean)
        return Series(name, "live", "line", widths, self.mean, low=low, high=high)

    def ends(self) -> str:
        """Where it begins and where it ends, in words."""
        return f"{self.mean[0]:.3g} to {self.mean[-1]:.3g}"


@lru_cache(maxsize=8)
def dot_products(keys: int, seed: int) -> Array:
    """q·k, (widths, heads, rows, keys): the logsumexp of rows that see one key."""
    heads = min(_MOST, max(1, _NUMBERS // (keys * WIDTHS[-1])))
    q = normals(seed, "sweep queries", heads, ROWS, WIDTHS[-1])
    k = normals(seed, "sweep keys", heads, keys, WIDTHS[-1])
    found = np.empty((len(WIDTHS), heads, ROWS, keys), np.float32)
    for i, d_k in enumerate(WIDTHS):
        # Turned round, as that is faster: all keys ask, and each query is the one key of a head.
        asking = np.broadcast_to(k[:, None, :, :d_k], (heads, ROWS, keys, d_k))
        found[i] = observe(asking, q[:, :, None, :d_k], scale=1.0).logsumexp
    found.flags.writeable = False
    return found


def curves(keys: int, seed: int, divide: str, power: float = 0.5) -> dict[str, Curve]:
    """Over WIDTHS: "entropy" (H/ln n), "top1" and "jacobian" (‖J‖_F)."""
    products = dot_products(keys, seed)
    found: dict[str, list[Array]] = {"entropy": [], "top1": [], "jacobian": []}
    for d_k, one in zip(WIDTHS, products, strict=True):
        rows = statistics(one, scale_of(divide, d_k, power))
        for name, values in rows.items():
            found[name].append(values)
    return {name: curve(np.array(values)) for name, values in found.items()}


def statistics(products: Array, scale: float) -> dict[str, Array]:
    """Of each row of (heads, rows, keys): a dot product is a key of width 1 for the query 1.

    ‖J‖² = Σp² - 2 Σp³ + (Σp²)² for J = diag(p) - p pᵀ, and Σp³ = exp(lse(3s) - 3 lse(s)): the same
    rows at three times the scale, as a second head.
    """
    keys = products.shape[-1]
    k = products.reshape(-1, 1, keys, 1).astype(np.float64)
    rows = observe(np.ones((len(k), 2, 1, 1)), k, scale=[scale, 3 * scale]).rows
    shape = products.shape[:-1]
    square = rows.sum_p2[:, 0, 0]
    cube = np.exp(rows.logsumexp[:, 1, 0] - 3 * rows.logsumexp[:, 0, 0])
    return {
        "entropy": (rows.entropy[:, 0, 0] / math.log(keys)).reshape(shape),
        "top1": rows.top1[:, 0, 0].reshape(shape),
        "jacobian": np.sqrt(np.maximum(square - 2 * cube + square**2, 0.0)).reshape(shape),
    }


def curve(values: Array) -> Curve:
    """Of (widths, heads, rows); the error of a single row is NaN.

    Heads are independent, but few where keys are many; rows of a head share its keys, which hardly
    shows in many. The larger of both errors is on the safe side.
    """
    heads, rows = values.mean(-1), values.reshape(len(values), -1)
    units = [x for x in (heads, rows) if x.shape[-1] > 1]
    errors = [x.std(-1, ddof=1) / math.sqrt(x.shape[-1]) for x in units]
    return Curve(rows.mean(-1), np.max(errors or [np.full(len(rows), np.nan)], axis=0))


# ---- theory: independent normal logits of standard deviation s ----------------


def _spread(divide: str, power: float) -> Array:
    return np.array([math.sqrt(d_k) * scale_of(divide, d_k, power) for d_k in WIDTHS])


def entropy_theory(keys: int, divide: str, power: float = 0.5) -> Array:
    """H/ln n for H ≈ ln n - (1 - 1/n) s²/2. At s = √(2 ln n) few keys take all; NaN from half of
    that on, where the next term can be seen."""
    s, log = _spread(divide, power), math.log(keys)
    return np.where(s < math.sqrt(2 * log) / 2, 1 - (1 - 1 / keys) * s**2 / (2 * log), np.nan)


def jacobian_theory(keys: int, divide: str, power: float = 0.5) -> Array:
    """‖J‖_F from Σp^m ≈ n^(1-m) exp(m(m-1) s²/2); NaN from s = √(2 ln n)/3 on, where the cubes
    of a few keys are more than this average."""
    s, n = _spread(divide, power), keys
    with np.errstate(over="ignore", invalid="ignore"):
        square, cube = np.exp(s**2) / n, np.exp(3 * s**2) / n**2
        found = np.sqrt(np.maximum(square - 2 * cube + square**2, 0.0))
    return np.where(s < math.sqrt(2 * math.log(n)) / 3, found, np.nan)
