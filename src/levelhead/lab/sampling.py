"""Random queries and keys, what the core says of them, and how sure one may be of that.

A standard error is taken over batches, each with keys of its own: rows that share keys are not
independent of each other. Everything a claim sweeps over d_k is drawn and measured here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from levelhead.attention import observe
from levelhead.errors import LevelheadValueError, expected
from levelhead.lab.claim import Params, Tell
from levelhead.lab.experiment import Setting, weights
from levelhead.lab.settings import whole
from levelhead.lab.verdict import line

__all__ = [
    "BOUND",
    "Curve",
    "agree",
    "count",
    "curve",
    "gather",
    "measure",
    "number",
    "numbers",
    "parts",
    "settings",
    "shares_agree",
    "slope",
    "sweep",
]

Array = NDArray[Any]

BOUND = 4.0  # standard errors; a verdict rests on a few dozen comparisons, and 3 would miss by chance

_NUMBERS = 2**24  # drawn at a time: 64 MB


@dataclass(frozen=True)
class Curve:
    """Means over x, with their standard errors."""

    x: tuple[float, ...]
    y: tuple[float, ...]
    stderr: tuple[float, ...]

    def json(self) -> dict[str, list[float]]:
        return {"x": list(self.x), "y": list(self.y), "stderr": list(self.stderr)}

    def steps(self) -> list[float]:
        """From each point to the next, in standard errors of the difference."""
        y, squares = np.asarray(self.y), np.square(self.stderr)
        return list((np.diff(y) / np.sqrt(squares[1:] + squares[:-1] + 1e-300)).tolist())


def curve(x: Sequence[float], samples: Sequence[ArrayLike]) -> Curve:
    """The means of independent samples, one set of them for each x."""
    found = [np.asarray(one, np.float64).ravel() for one in samples]
    return Curve(
        tuple(float(at) for at in x),
        tuple(float(one.mean()) for one in found),
        tuple(float(one.std(ddof=1) / np.sqrt(one.size)) for one in found),
    )


def agree(found: Curve, theory: ArrayLike, *, relative: float = 0.0) -> bool:
    """Whether every point is within BOUND standard errors of theory, or within a share of it."""
    wanted = np.asarray(theory, np.float64)
    room = BOUND * np.asarray(found.stderr) + relative * np.abs(wanted)
    return bool(np.all(np.abs(np.asarray(found.y) - wanted) <= room))


def shares_agree(found: Curve, theory: Sequence[float], rows: int) -> bool:
    """The same for shares of so many rows: where none was hit their error is still not 0."""
    wanted = np.asarray(theory, np.float64)
    by_chance = np.sqrt(wanted * (1 - wanted) / rows)
    room = BOUND * np.maximum(found.stderr, by_chance) + 1 / rows
    return bool(np.all(np.abs(np.asarray(found.y) - wanted) <= room))


def slope(found: Curve) -> tuple[float, float]:
    """The exponent p of y ~ x^p with its standard error: a weighted line through logarithms."""
    errors = np.asarray(found.stderr) / np.asarray(found.y)
    fitted = line(np.log(found.x), np.log(found.y), errors)
    return fitted.slope, fitted.slope_error


def count(params: Params, name: str, least: int, most: int = 2**24) -> int:
    """A parameter that counts something."""
    return whole(name, params[name], least, most)


def number(params: Params, name: str, low: float, high: float) -> float:
    """A parameter that is one number."""
    value = params[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        wanted, advice = f"a number from {low:g} to {high:g}", "Choose one in this range"
        raise LevelheadValueError(expected(name, wanted, repr(value), advice))
    return float(value)


def numbers(params: Params, name: str) -> list[float]:
    """A parameter that lists numbers above 0, ascending."""
    given = params[name]
    right = isinstance(given, list | tuple) and all(
        isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < np.inf for x in given
    )
    if not right or not given or sorted(given) != list(given):
        advice = "Give for example [1, 2, 4]"
        raise LevelheadValueError(expected(name, "a list of ascending numbers above 0", repr(given), advice))
    return [float(x) for x in given]


def settings(params: Params, seed: int, divide: str) -> list[Setting]:
    """One setting for each d_k of the parameters, checked before any work."""
    widths = params["d_k"]
    if not isinstance(widths, list | tuple) or len(widths) < 2 or sorted(widths) != list(widths):
        advice = "Give for example [4, 64, 1024]"
        raise LevelheadValueError(expected("d_k", "two or more, ascending", repr(widths), advice))
    return [Setting(d_k=d, divide=divide, keys=params["keys"], seed=seed) for d in widths]


def parts(setting: Setting, batches: int, queries: int) -> Iterator[tuple[Array, Array]]:
    """Normal queries (B, T, D) and keys (B, S, D), so many batches at a time as memory allows.

    Every batch has keys of its own.
    """
    rng = np.random.default_rng((setting.seed, setting.d_k))
    most = max(1, _NUMBERS // (setting.keys * setting.d_k))
    for done in range(0, batches, most):
        B = min(most, batches - done)
        q = rng.standard_normal((B, queries, setting.d_k), np.float32)
        yield q, rng.standard_normal((B, setting.keys, setting.d_k), np.float32)


def measure(q: Array, k: Array, scale: Any) -> dict[str, Array]:
    """Batch means, (B,), of what the core says of these rows."""
    heads = observe(q, k, scale=scale).heads
    p = weights(q, k, scale).astype(np.float64)
    p2, p3 = (p**2).sum(-1), (p**3).sum(-1)
    return {
        "entropy": heads.mean_entropy,
        "top1": heads.mean_top1,
        "gradient": heads.gradient,  # Σ p(1-p)
        "jacobian": np.sqrt(p2 - 2 * p3 + p2**2).mean(-1),  # ‖diag(p) - p pᵀ‖_F
        "std": np.sqrt(heads.var_logit * k.shape[-2] / (k.shape[-2] - 1)),  # unbiased
        "saturated": heads.saturated,
    }


def gather(found: Iterable[Mapping[str, Array]]) -> dict[str, Array]:
    """What was measured of each part, as one."""
    each = list(found)
    return {name: np.concatenate([one[name] for one in each]) for name in each[0]}


def sweep(params: Params, seed: int, tell: Tell, divide: str) -> Mapping[str, Curve]:
    """Every statistic over the d_k of the parameters, under one divisor."""
    batches, queries = count(params, "batches", 2), count(params, "queries", 1)
    chosen, found = settings(params, seed, divide), []
    for done, one in enumerate(chosen):
        tell(done / len(chosen), f"d_k = {one.d_k}, divided by {divide}")
        found.append(gather(measure(q, k, one.scale) for q, k in parts(one, batches, queries)))
    widths = [one.d_k for one in chosen]
    return {name: curve(widths, [one[name] for one in found]) for name in found[0]}
