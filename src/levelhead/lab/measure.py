"""Every measurement of the lab: random queries and keys, and what the core computes for them.

Claims and figures share these functions. They differ in how they draw: a claim draws independent heads for every d_k
(`batches`, `over_widths`), because its standard errors must be right; a figure cuts all widths out of one draw
(`dot_products`, `over_nested_widths`), because its curves must be smooth. Attention is always the core's: a logit is
the logsumexp of a row that sees one key, weights are outputs for identity values (`levelhead.weights`).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from levelhead.attention import observe
from levelhead.call import scaling
from levelhead.gradients import attention_backward
from levelhead.lab.claim import Params, Tell
from levelhead.lab.parameters import POWER, check, default
from levelhead.lab.settings import refused, whole
from levelhead.lab.theory import frobenius
from levelhead.weights import weights

Array = NDArray[Any]

HEADS = 8  # of the model whose width d = 8 · d_k is meant by "1/sqrt(d)"
WIDTHS = tuple(2**i for i in range(13))  # 1 … 4096
PAIRS = 4096  # of a query and a key, at most
ROWS = 8  # queries of a head in `dot_products`

_PAIR_NUMBERS = 2**21  # drawn for each side of the pairs, at most: wide pairs are fewer
_BATCH_NUMBERS = 2**24  # drawn at a time: 64 MB
_NESTED_NUMBERS = 2**22  # drawn for the keys of all nested heads, but for one head at least
_NESTED_HEADS = 12  # at most


@dataclass(frozen=True)
class Setting:
    """One random head: its width, its scale, its number of keys, its seed."""

    d_k: int = default("d_k")
    scale: str = default("scale")
    power: float = default("power")  # p, where the scale is "1/d_k^p"
    keys: int = default("keys")
    seed: int = default("seed")

    def __post_init__(self) -> None:
        check(**vars(self))

    @property
    def factor(self) -> float:
        """The number that multiplies q·k."""
        return factor_of(self.scale, self.d_k, self.power)


def factor_of(scale: str, d_k: int, power: float = 0.5) -> float:
    """The number that multiplies q·k under a scale rule, in a model of eight heads."""
    if scale == POWER:
        return scaling.power(d_k, power)
    return float(scaling.resolve(scale, heads=HEADS, d_k=d_k).factor[0])


def divisor(scale: str, power: float = 0.5) -> str:
    """The divisor of a scale rule as text."""
    texts = {"none": "1", "1/sqrt(d_k)": "√d_k", "1/d_k": "d_k", "1/sqrt(d)": f"√({HEADS} d_k)"}
    return texts.get(scale) or f"d_k^{power:g}"


def divided(scale: str, power: float = 0.5) -> str:
    """ "undivided", or "divided by …"."""
    return "undivided" if scale == "none" else f"divided by {divisor(scale, power)}"


# ---- means with standard errors ----------------------------------------------


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
    sets = [np.asarray(one, np.float64).ravel() for one in samples]
    errors = tuple(float(one.std(ddof=1) / np.sqrt(one.size)) for one in sets)
    return Curve(tuple(map(float, x)), tuple(float(one.mean()) for one in sets), errors)


def clustered_curve(x: Sequence[float], values: Array) -> Curve:
    """The means of values (x, heads, rows); the error of a single row is NaN.

    Heads are independent, but few where keys are many; rows of a head share its keys, which matters little where
    keys are many. The larger of both errors is on the safe side.
    """
    heads, rows = values.mean(-1), values.reshape(len(values), -1)
    units = [unit for unit in (heads, rows) if unit.shape[-1] > 1]
    errors = [unit.std(-1, ddof=1) / math.sqrt(unit.shape[-1]) for unit in units]
    stderr = np.max(errors or [np.full(len(rows), np.nan)], axis=0)
    return Curve(tuple(map(float, x)), tuple(rows.mean(-1).tolist()), tuple(stderr.tolist()))


# ---- draws -------------------------------------------------------------------


def normals(seed: int, stream: str, *shape: int) -> Array:
    """Independent standard normal numbers. Two calls share numbers only if seed and stream are equal."""
    random = np.random.default_rng([seed, zlib.crc32(stream.encode())])
    return random.standard_normal(shape, np.float32)


def pairs(setting: Setting) -> tuple[Array, Array]:
    """Queries and keys, each used once: (pairs, d_k) both."""
    shape = (min(PAIRS, _PAIR_NUMBERS // setting.d_k), setting.d_k)
    return normals(setting.seed, "pair queries", *shape), normals(setting.seed, "pair keys", *shape)


def row(setting: Setting) -> tuple[Array, Array]:
    """The one attention row of the figures: a query (1, d_k) and its keys (keys, d_k)."""
    query = normals(setting.seed, "row query", 1, setting.d_k)
    return query, normals(setting.seed, "row keys", setting.keys, setting.d_k)


def batches(setting: Setting, number: int, queries: int) -> Iterator[tuple[Array, Array]]:
    """Normal queries (B, T, D) and keys (B, S, D), so many batches at a time as memory allows.

    Every batch has its own keys: rows that share keys are not independent, so standard errors are taken over batches.
    """
    random = np.random.default_rng((setting.seed, setting.d_k))
    most = max(1, _BATCH_NUMBERS // (setting.keys * setting.d_k))
    for begin in range(0, number, most):
        B = min(most, number - begin)
        q = random.standard_normal((B, queries, setting.d_k), np.float32)
        yield q, random.standard_normal((B, setting.keys, setting.d_k), np.float32)


@lru_cache(maxsize=8)
def dot_products(keys: int, seed: int) -> Array:
    """q·k, (widths, heads, rows, keys), of heads drawn once; a narrower head is the first columns of a wide one."""
    heads = min(_NESTED_HEADS, max(1, _NESTED_NUMBERS // (keys * WIDTHS[-1])))
    q = normals(seed, "sweep queries", heads, ROWS, WIDTHS[-1])
    k = normals(seed, "sweep keys", heads, keys, WIDTHS[-1])
    products = np.empty((len(WIDTHS), heads, ROWS, keys), np.float32)
    for i, d_k in enumerate(WIDTHS):
        # Keys and queries change places, which is faster: every key is a query of a head with one key.
        swapped = np.broadcast_to(k[:, None, :, :d_k], (heads, ROWS, keys, d_k))
        products[i] = observe(swapped, q[:, :, None, :d_k], scale=1.0).logsumexp
    products.flags.writeable = False
    return products


# ---- one call of the core ----------------------------------------------------


def pair_logits(q: Array, k: Array, scale: Any, **options: Any) -> Array:
    """s = q·k · scale of each pair (…, d): a row with one key has logsumexp s."""
    single = observe(q[..., None, None, :], k[..., None, None, :], scale=scale, **options)
    return np.asarray(single.logsumexp)[..., 0, 0]


def logit_gradients(dp: Array, q: Array, k: Array, scale: Any) -> tuple[Array, Array]:
    """The first weights p of every row, and dL/ds of all its logits for dL/dp = `dp` of these weights.

    Identity values turn weights into outputs. A mask of zeros is added to the logits, so its gradient is theirs.
    """
    values = np.eye(k.shape[-2], dp.shape[-1], dtype=k.dtype)
    values = np.broadcast_to(values, (*k.shape[:-2], *values.shape))
    options: dict[str, Any] = {"scale": scale, "mask": np.zeros((*dp.shape[:-1], k.shape[-2]), k.dtype)}
    observation = observe(q, k, values, **options)
    (ds,) = attention_backward(dp, q, k, values, observation.output, observation.logsumexp, wrt=("mask",), **options)
    return np.asarray(observation.output), np.asarray(ds)


def statistics(q: Array, k: Array, scale: Any) -> dict[str, Array]:
    """Batch means, (B,), of the rows' statistics."""
    heads = observe(q, k, scale=scale).heads
    p = weights(q, k, scale).astype(np.float64)
    return {
        "entropy": heads.mean_entropy,
        "top1": heads.mean_top1,
        "gradient": heads.gradient,  # Σ p(1-p)
        "jacobian": frobenius((p**2).sum(-1), (p**3).sum(-1)).mean(-1),
        "std": np.sqrt(heads.var_logit * k.shape[-2] / (k.shape[-2] - 1)),  # unbiased
        "saturated": heads.saturated,
    }


def row_statistics(products: Array, factor: float) -> dict[str, Array]:
    """Statistics of every row of dot products (…, keys): a dot product is a key of width 1 for the query 1.

    Σp³ = exp(lse(3s) - 3 lse(s)) comes from the same rows at three times the scale, as a second head: weights of many
    keys would take too long.
    """
    keys = products.shape[-1]
    k = products.reshape(-1, 1, keys, 1).astype(np.float64)
    rows = observe(np.ones((len(k), 2, 1, 1)), k, scale=[factor, 3 * factor]).rows
    cube = np.exp(rows.logsumexp[:, 1, 0] - 3 * rows.logsumexp[:, 0, 0])
    by_name = {
        "entropy": rows.entropy[:, 0, 0] / math.log(keys),
        "top1": rows.top1[:, 0, 0],
        "jacobian": frobenius(rows.sum_p2[:, 0, 0], cube),
    }
    return {name: values.reshape(products.shape[:-1]) for name, values in by_name.items()}


# ---- over the width of heads -------------------------------------------------


def settings(params: Params, seed: int, scale: str) -> list[Setting]:
    """One setting for each d_k of a claim's parameters, checked before any work."""
    widths = params["d_k"]
    if not isinstance(widths, list | tuple) or len(widths) < 2 or sorted(widths) != list(widths):
        raise refused("d_k", "two or more, ascending", widths)
    return [Setting(d_k=d_k, scale=scale, keys=params["keys"], seed=seed) for d_k in widths]


def batch_sizes(params: Params) -> tuple[int, int]:
    """How many batches, and how many queries in each, a claim's parameters name."""
    return whole("batches", params["batches"], 2), whole("queries", params["queries"], 1)


def gather(parts: Iterable[Mapping[str, Array]]) -> dict[str, Array]:
    """The statistics of all parts, joined by name."""
    each = list(parts)
    return {name: np.concatenate([one[name] for one in each]) for name in each[0]}


def over_widths(params: Params, seed: int, tell: Tell, scale: str) -> Mapping[str, Curve]:
    """Every statistic over the d_k of a claim's parameters, under one scale; independent heads."""
    number, queries = batch_sizes(params)
    chosen, measured = settings(params, seed, scale), []
    for done, one in enumerate(chosen):
        tell(done / len(chosen), f"d_k = {one.d_k}, {divided(scale)}")
        measured.append(gather(statistics(q, k, one.factor) for q, k in batches(one, number, queries)))
    widths = [one.d_k for one in chosen]
    return {name: curve(widths, [one[name] for one in measured]) for name in measured[0]}


def over_nested_widths(keys: int, seed: int, scale: str, power: float = 0.5) -> dict[str, Curve]:
    """Over WIDTHS: "entropy" (H/ln n), "top1" and "jacobian" (‖J‖_F); nested heads."""
    measured = [
        row_statistics(products, factor_of(scale, d_k, power))
        for d_k, products in zip(WIDTHS, dot_products(keys, seed), strict=True)
    ]
    return {name: clustered_curve(WIDTHS, np.array([one[name] for one in measured])) for name in measured[0]}
