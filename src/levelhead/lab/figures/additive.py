"""Additive attention beside the dot product: scores that tanh bounds, however wide the head is.

Scores are w_v · tanh(W_q q + W_k k) with weights drawn as one initialises them: W of variance
1/d_k, w_v of variance 1/A. `lh.additive_attention` hands out no scores; with identity values it
hands out the weights p, and ln p are the scores up to a constant per row, which a spread does not
see.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead.additive import additive_attention
from levelhead.lab import measure, recorded
from levelhead.lab.figure import Axis, Chart, Fact, Figure, Series
from levelhead.lab.figures import parts
from levelhead.lab.measure import WIDTHS, Curve, Setting, clustered_curve, divided, factor_of, normals

NEEDS = ("keys", "seed")
CLAIMS = ("C13", "C13a")
A = 32  # numbers the tanh is taken of
ROWS, HEADS = 8, 3
MOST_KEYS = 1024  # more would take a second and show the same
_RULES = ("none", "1/sqrt(d_k)")

Array = NDArray[Any]


def figure(setting: Setting) -> Figure:
    keys = min(setting.keys, MOST_KEYS)
    scores, bound = additive_scores(keys, setting.seed)
    spread, entropy = _over_rows(scores), _entropy(scores, np.ones(len(WIDTHS)))
    products = measure.dot_products(keys, setting.seed)
    charts = [
        _chart(
            "Spread of scores in a row",
            "σ of a row's scores",
            "additive",
            spread,
            {one: _over_rows(products * _factors(one)[:, None, None, None]) for one in _RULES},
            log=True,
            theory=_theory(bound),
        ),
        _chart(
            "Entropy",
            "H/ln n",
            "additive",
            entropy,
            {one: _entropy(products, _factors(one)) for one in _RULES},
            log=False,
            theory=(),
        ),
    ]
    speed = recorded.load("speed")
    times = _speed(speed)
    return Figure(
        "additive",
        "Additive attention beside the dot product",
        (*charts, times),
        parts.code("additive", setting),
        facts=(
            Fact("keys measured", keys, "live"),
            *(
                Fact(f"σ of additive scores at d_k = {WIDTHS[i]}", spread.y[i], "live", spread.stderr[i])
                for i in (0, 6, 12)
            ),
            Fact("no score is larger than", bound, "theory", formula="‖w_v‖₁"),
            Fact("largest difference of scores seen", float(np.ptp(scores, axis=-1).max()), "live"),
            Fact("additive over dot product, 512 tokens", _ratio(speed), "recorded"),
        ),
        note="tanh bounds every term, so additive scores soon stop spreading as heads get wider, "
        "with no divisor; undivided dot products do not. The bound is ‖w_v‖₁ and grows with w_v. "
        "It is paid for in time: a tanh for each of 32 numbers of every pair (64 where time was "
        "recorded).",
        recorded=recorded.source(speed["about"]),
    )


@lru_cache(maxsize=8)
def additive_scores(keys: int, seed: int) -> tuple[Array, float]:
    """ln p of (widths, heads, rows, keys), and the largest ‖w_v‖₁."""
    heads = HEADS if keys <= 256 else 1
    widest = WIDTHS[-1]
    q = normals(seed, "additive queries", heads, ROWS, widest)
    k = normals(seed, "additive keys", heads, keys, widest)
    w_q, w_k = (normals(seed, f"additive {name}", heads, A, widest) for name in ("W_q", "W_k"))
    w_v = normals(seed, "additive w_v", heads, A) / np.float32(math.sqrt(A))
    projected = [_projected(x, w) for x, w in ((q, w_q), (k, w_k))]
    values, identity = np.eye(keys, dtype=np.float32), np.eye(A, dtype=np.float32)
    scores = np.empty((len(WIDTHS), heads, ROWS, keys))
    for i, sides in enumerate(zip(*projected, strict=True)):
        for h in range(heads):
            queries, keys_of_head = (side[h] for side in sides)
            weights = additive_attention(queries, keys_of_head, values, identity, identity, w_v[h])
            scores[i, h] = np.log(np.asarray(weights, np.float64))
    scores.flags.writeable = False
    return scores, float(np.abs(w_v).sum(-1).max())


def _projected(x: Array, w: Array) -> list[Array]:
    """W x for every width, (heads, rows, A) each, W of variance 1/d_k.

    Widths are summed up block by block, without BLAS: its threads and the core's, side by side,
    wait for each other longer than all of this takes.
    """
    projected, total, begin = [], np.float32(0), 0
    for d_k in WIDTHS:
        block = slice(begin, d_k)
        total = total + np.einsum("hnd,had->hna", x[..., block], w[..., block])
        projected.append(total / np.float32(math.sqrt(d_k)))
        begin = d_k
    return projected


def _factors(scale: str) -> Array:
    return np.array([factor_of(scale, d_k) for d_k in WIDTHS])


def _over_rows(scores: Array) -> Curve:
    """The spread of each row's scores, (widths, heads, rows, keys) → a curve over widths."""
    return clustered_curve(WIDTHS, scores.std(-1, dtype=np.float64))


def _entropy(scores: Array, scales: Array) -> Curve:
    pairs = zip(scores, scales, strict=True)
    return clustered_curve(WIDTHS, np.array([measure.row_statistics(s, float(x))["entropy"] for s, x in pairs]))


def _theory(bound: float) -> tuple[Series, ...]:
    x = np.array(WIDTHS)
    return (
        Series("undivided, theory: √d_k", "theory", "line", x, np.sqrt(x)),
        Series("bound of additive scores, ‖w_v‖₁", "theory", "line", x, np.full(len(x), bound)),
    )


def _chart(
    title: str, unit: str, name: str, additive: Curve, dot: dict[str, Curve], *, log: bool, theory: tuple[Series, ...]
) -> Chart:
    lines = {name: additive} | {f"dot product, {divided(one)}": x for one, x in dot.items()}
    series = [parts.line(curve, label) for label, curve in lines.items()]
    return Chart(title, parts.AXIS, Axis(unit, log=log), (*series, *theory), parts.ends(lines))


# ---- speed: a committed run -----------------------------------------------------


def _speed(speed: dict[str, Any]) -> Chart:
    lines = {"additive": speed["additive"], "dot product": speed["dot_product"]}
    series = [
        Series(name, "recorded", "points", list(map(int, x)), [1e3 * t for t in x.values()])
        for name, x in lines.items()
    ]
    return Chart(
        "Time of one head, both in levelhead",
        Axis("tokens", log=True),
        Axis("milliseconds", log=True),
        series,
        f"additive attention takes {_ratio(speed):.3g} times as long at 512 tokens",
    )


def _ratio(speed: dict[str, Any]) -> float:
    return float(speed["additive"]["512"] / speed["dot_product"]["512"])
