"""Chapter 0: two heads with the same q and k attend over one sentence; one of them divides by √64 = 8."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead.attention import observe
from levelhead.course.chapter import Chapter
from levelhead.course.numbers import Number, live, theory
from levelhead.course.results import head

D_K = 64
WORDS = ("The", "dog", "chased", "the", "ball", "because", "it", "was", "fast")
QUERY = 6  # "it" asks
FIRST = 3  # the seed that opens the chapter: a clear case. `numbers` has the mean over many, the scene eleven more
SEEDS = (FIRST, *(seed for seed in range(12) if seed != FIRST))
MANY = 4096  # draws behind the averages


def draw(seed: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """One query and a key per word, standard normal; the samples draw the same numbers."""
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal(D_K), rng.standard_normal((len(WORDS), D_K))
    return q.astype(np.float32)[None], k.astype(np.float32)


@cache
def _heads() -> tuple[dict[str, Any], ...]:
    draws = [draw(seed) for seed in SEEDS]
    return tuple(
        {"scores": (k @ q[0]).tolist()} | {name: head(q, k, scale) for name, scale in _SCALES.items()} for q, k in draws
    )


@cache
def _left() -> dict[str, float]:
    """1 − Σp² as a mean over many draws."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((MANY, 1, D_K), np.float32)
    k = rng.standard_normal((MANY, len(WORDS), D_K), np.float32)
    return {name: float(1 - observe(q, k, scale=scale).rows.sum_p2.mean()) for name, scale in _SCALES.items()}


_SCALES = {"undivided": 1.0, "divided": 1 / math.sqrt(D_K)}


def numbers() -> Mapping[str, Number]:
    first = _heads()[0]
    here = f"seed {FIRST}"
    many = f"{MANY} draws, seed 0"
    return {
        "d_k": theory(D_K, "chosen"),
        "divisor": theory(math.isqrt(D_K), "√64"),
        "words": theory(len(WORDS), "chosen"),
        "top_undivided": live(first["undivided"]["top1"], here, 3),
        "top_divided": live(first["divided"]["top1"], here, 3),  # as at its bar
        "left_undivided": live(first["undivided"]["left"], here),
        "left_divided": live(first["divided"]["left"], here),
        "factor": live(first["divided"]["left"] / first["undivided"]["left"], here, 1),
        "draws": theory(MANY, "chosen"),
        "mean_undivided": live(_left()["undivided"], many),
        "mean_divided": live(_left()["divided"], many),
        "most": theory(1 - 1 / len(WORDS), "1 − 1/9"),
        "others": theory(len(WORDS) - 1, "9 − 1"),
    }


def data() -> Any:
    return {"words": WORDS, "query": QUERY, "draws": _heads()}


CHAPTER = Chapter(
    "hook",
    options=("undivided", "divided", "both", "neither"),
    answer="divided",
    claims=("C5", "C6"),
    numbers=numbers,
    data=data,
)
