"""Chapter 1: three words through one head, every number in sight: [3×512] → [3×64] → [3×3] → weights → [3×64]."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead.attention import attention
from levelhead.course.chapter import Chapter
from levelhead.course.numbers import Number, live, theory
from levelhead.lab.measure import pair_logits
from levelhead.weights import weights

WORDS = ("Love", "Apple", "phones")
WIDTH, HEADS = 512, 8
D_K = WIDTH // HEADS
LOVE, APPLE = 0, 1
SEED = 0  # the samples and the first notebook draw the same numbers

Array = NDArray[np.float64]


@cache
def _head() -> dict[str, Array]:
    """Every matrix of the first head, by its name, and what the eight heads give together."""
    rng = np.random.default_rng(SEED)
    x = rng.standard_normal((len(WORDS), WIDTH))
    found = {"X": x} | dict(zip(("W_Q", "W_K", "W_V"), _random(rng, 3, WIDTH, D_K), strict=True))
    q, k, v = (x @ found[name] for name in ("W_Q", "W_K", "W_V"))
    asking, asked = np.broadcast_arrays(q[:, None], k[None])
    scores = pair_logits(asking, asked, 1.0)
    scale = 1 / math.sqrt(D_K)
    others = [attention(*(x @ one for one in matrices)) for matrices in _random(rng, HEADS - 1, 3, WIDTH, D_K)]
    joined = np.concatenate([attention(q, k, v), *others], axis=1)
    return found | {
        "Q": q,
        "K": k,
        "V": v,
        "terms": q[APPLE] * k[LOVE],
        "scores": scores,
        "divided": scores * scale,
        "weights": weights(q, k, scale),
        "undivided": weights(q, k, 1.0),
        "output": attention(q, k, v),
        "joined": joined,
        "projected": joined @ _random(rng, WIDTH, WIDTH),
    }


def _random(rng: np.random.Generator, *shape: int) -> Array:
    """Entries of variance 1/512: what they project keeps its size."""
    matrix: Array = rng.standard_normal(shape) / math.sqrt(WIDTH)
    return matrix


def _farthest(table: Array) -> float:
    """The entry farthest from zero."""
    return float(table.flat[np.abs(table).argmax()])


def numbers() -> Mapping[str, Number]:
    found, here = _head(), "levelhead, seed 0"
    apple = found["weights"][APPLE]
    sums = np.cumsum(found["terms"])
    return {
        "words": theory(len(WORDS), "chosen"),
        "d": theory(WIDTH, "chosen"),
        "heads": theory(HEADS, "chosen"),
        "d_k": theory(D_K, "chosen"),
        "divisor": theory(math.isqrt(D_K), "√64"),
        "variance_x": live(found["X"].var(), here, 3),
        "variance_q": live(found["Q"].var(), here, 3),
        "q_first": live(found["Q"][APPLE, 0], here),
        "sum_highest": live(sums.max(), here),
        "sum_lowest": live(sums.min(), here),
        "apple_love": live(found["scores"][APPLE, LOVE], here),
        "apple_love_divided": live(found["divided"][APPLE, LOVE], here),
        "farthest": live(_farthest(found["scores"]), here, 4),  # as the tables show them
        "farthest_divided": live(_farthest(found["divided"]), here, 3),
        "w_love": live(apple[0], here),
        "w_apple": live(apple[1], here),
        "w_phones": live(apple[2], here),
        "undivided_top": live(found["undivided"][APPLE].max(), here),
        "out_first": live(found["output"][APPLE, 0], here),
    }


def data() -> Any:
    """Rounded here, so that the page shows the digits that the words show."""
    found = _head()
    rows = {name: found[name].round(2) for name in ("X", "Q", "K", "V", "scores", "divided", "weights", "output")}
    return rows | {
        "words": WORDS,
        "column": found["W_Q"][:, 0].round(3),
        "terms": found["terms"].round(2),
        "sums": np.cumsum(found["terms"]).round(2),
        "totals": found["weights"].sum(1).round(6),
        "undivided": found["undivided"],
        "joined": found["joined"][APPLE].round(2),
        "projected": found["projected"][APPLE].round(2),
    }


CHAPTER = Chapter(
    "by_hand", options=("input", "head", "table"), answer="head", claims=("C1a",), numbers=numbers, data=data, steps=9
)
