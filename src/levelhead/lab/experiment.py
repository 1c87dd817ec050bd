"""The page's one experiment: random queries and keys, a divisor, and what the core makes of them.

Four things are shared by all figures: the head width d_k, what one divides by, the number of keys,
the seed. Everything that is measured here goes through the core: a logit is the logsumexp of a row
that sees one key, a weight is the output for values that are the identity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import levelhead as lh
from levelhead.errors import LevelheadValueError, expected

__all__ = ["DIVISORS", "HEADS", "Setting", "logits", "scale_of", "weights"]

HEADS = 8  # of the model whose width d = 8 · d_k stands behind "√d"
DIVISORS = ("none", "sqrt", "d_k", "width", "power")  # nothing, √d_k, d_k, √(8 d_k), d_k^p
D_K, KEYS, SEED = (1, 4096), (2, 4096), (0, 2**32 - 1)

Array = NDArray[Any]


@dataclass(frozen=True)
class Setting:
    d_k: int = 64
    divide: str = "sqrt"
    power: float = 0.5  # p of d_k^p, where divide is "power"
    keys: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        for name, (low, high) in (("d_k", D_K), ("keys", KEYS), ("seed", SEED)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise _wrong(name, f"a whole number from {low} to {high}", value)
        if self.divide not in DIVISORS:
            raise _wrong("divide", f"one of {', '.join(DIVISORS)}", self.divide)
        if not (isinstance(self.power, int | float) and 0 <= self.power <= 1):
            raise _wrong("power", "a number from 0 to 1", self.power)

    @property
    def scale(self) -> float:
        return scale_of(self.divide, self.d_k, self.power)

    def call(self, figure: str) -> str:
        """The line of Python that makes this figure again."""
        given = [f"d_k={self.d_k}", f"divide={self.divide!r}"]
        given += [f"power={self.power:g}"] if self.divide == "power" else []
        given += [f"keys={self.keys}", f"seed={self.seed}"]
        return f"lh.lab.figure({figure!r}, {', '.join(given)})"


def scale_of(divide: str, d_k: int, power: float = 0.5) -> float:
    """One over the divisor."""
    powers = {"none": 0.0, "sqrt": 0.5, "d_k": 1.0, "power": power}
    if divide == "width":
        return float((HEADS * d_k) ** -0.5)
    return float(d_k ** -powers[divide])


def logits(q: Array, k: Array, scale: Any) -> Array:
    """s = q · k · scale of each pair (…, d), from the core: a row with one key has logsumexp s."""
    one = lh.observe(q[..., None, None, :], k[..., None, None, :], scale=scale)
    return np.asarray(one.logsumexp)[..., 0, 0]


def weights(q: Array, k: Array, scale: Any, **options: Any) -> Array:
    """softmax(q kᵀ · scale), (…, T, S), from the core: identity values bring the weights out."""
    keys = k.shape[-2]
    identity = np.broadcast_to(np.eye(keys, dtype=k.dtype), (*k.shape[:-2], keys, keys))
    return np.asarray(lh.attention(q, k, identity, scale=scale, **options))


def _wrong(name: str, wanted: str, given: object) -> LevelheadValueError:
    return LevelheadValueError(expected(name, wanted, repr(given), "Choose a value in this range"))
