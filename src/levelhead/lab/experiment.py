"""The page's one experiment: random queries and keys, a divisor, and what the core makes of them.

Four things are shared by all figures: the head width d_k, what one divides by, the number of keys,
the seed. Everything that is measured here goes through the core: a logit is the logsumexp of a row
that sees one key, a weight is the output for values that are the identity.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead.attention import attention, observe
from levelhead.errors import LevelheadValueError, expected

__all__ = [
    "DIVISORS",
    "HEADS",
    "Setting",
    "divided",
    "divisor",
    "logits",
    "normals",
    "pairs",
    "row",
    "scale_of",
    "weights",
    "wrong",
]

HEADS = 8  # of the model whose width d = 8 · d_k stands behind "√d"
DIVISORS = ("none", "sqrt", "d_k", "width", "power")  # nothing, √d_k, d_k, √(8 d_k), d_k^p
D_K, KEYS, SEED = (1, 4096), (2, 4096), (0, 2**32 - 1)
PAIRS = 4096  # of a query and a key, at most
NUMBERS = 2**21  # drawn for each side of the pairs, at most: wide pairs are fewer

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
                raise wrong(name, f"a whole number from {low} to {high}", value)
        if self.divide not in DIVISORS:
            raise wrong("divide", f"one of {', '.join(DIVISORS)}", self.divide)
        real = isinstance(self.power, int | float) and not isinstance(self.power, bool)
        if not (real and 0 <= self.power <= 1):
            raise wrong("power", "a number from 0 to 1", self.power)

    @property
    def scale(self) -> float:
        return scale_of(self.divide, self.d_k, self.power)

    def python(self, figure: str, **own: Any) -> str:
        """The Python that prints this figure's numbers again; `own` are its own parameters."""
        given: dict[str, Any] = {"d_k": self.d_k, "divide": self.divide}
        given |= {"power": self.power} if self.divide == "power" else {}
        given |= {"keys": self.keys, "seed": self.seed}
        return python(figure, **given, **own)


def python(figure: str, **given: Any) -> str:
    """The Python that makes a figure with these parameters and prints it."""
    words = ", ".join([f'"{figure}"', *(f"{name}={_literal(x)}" for name, x in given.items())])
    return f"import levelhead as lh\n\nprint(lh.lab.figure({words}))\n"


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) and '"' not in value else repr(value)


def scale_of(divide: str, d_k: int, power: float = 0.5) -> float:
    """One over the divisor."""
    powers = {"none": 0.0, "sqrt": 0.5, "d_k": 1.0, "power": power}
    if divide == "width":
        return float((HEADS * d_k) ** -0.5)
    return float(d_k ** -powers[divide])


def divisor(divide: str, power: float = 0.5) -> str:
    """What one divides by, as one writes it by hand."""
    words = {"none": "1", "sqrt": "√d_k", "d_k": "d_k", "width": f"√({HEADS} d_k)"}
    return words.get(divide) or f"d_k^{power:g}"


def divided(divide: str, power: float = 0.5) -> str:
    """ "undivided", or "divided by …"."""
    return "undivided" if divide == "none" else f"divided by {divisor(divide, power)}"


def normals(seed: int, what: str, *shape: int) -> Array:
    """Independent standard normal numbers. Each `what` is a stream of its own: two figures share
    numbers only where they ask for the same ones."""
    stream = np.random.default_rng([seed, zlib.crc32(what.encode())])
    return stream.standard_normal(shape, np.float32)


def pairs(setting: Setting) -> tuple[Array, Array]:
    """Queries and keys, each used once: (pairs, d_k) both."""
    shape = (min(PAIRS, NUMBERS // setting.d_k), setting.d_k)
    return normals(setting.seed, "pair queries", *shape), normals(setting.seed, "pair keys", *shape)


def row(setting: Setting) -> tuple[Array, Array]:
    """The page's one attention row: a query (1, d_k) and its keys (keys, d_k)."""
    query = normals(setting.seed, "row query", 1, setting.d_k)
    return query, normals(setting.seed, "row keys", setting.keys, setting.d_k)


def logits(q: Array, k: Array, scale: Any, **options: Any) -> Array:
    """s = q · k · scale of each pair (…, d), from the core: a row with one key has logsumexp s."""
    one = observe(q[..., None, None, :], k[..., None, None, :], scale=scale, **options)
    return np.asarray(one.logsumexp)[..., 0, 0]


def weights(q: Array, k: Array, scale: Any, *, together: int = 1, **options: Any) -> Array:
    """softmax(q kᵀ · scale), (…, T, S), from the core: identity values bring the weights out.

    With `together`, so many neighbouring keys have the same value: their weights come out as one.
    """
    keys = k.shape[-2]
    groups = np.eye(-(-keys // together), dtype=k.dtype)
    values = np.repeat(groups, together, axis=0)[:keys]
    values = np.broadcast_to(values, (*k.shape[:-2], *values.shape))
    return np.asarray(attention(q, k, values, scale=scale, **options))


def wrong(name: str, wanted: str, given: object) -> LevelheadValueError:
    """The error for a parameter out of its range."""
    return LevelheadValueError(expected(name, wanted, repr(given), "Choose a value in this range"))
