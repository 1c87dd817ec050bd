"""Chapter 8: the rivals. Additive scores, which tanh bounds, and cosines: dot products with the lengths taken out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from levelhead.course.chapter import Chapter
from levelhead.course.numbers import Number, live, theory
from levelhead.course.results import claim, claim_number
from levelhead.lab.measure import pair_logits

D_K = 64
TERMS = 8  # of the additive score that is drawn
SEED = 4  # of its pair
GROWTH = 4  # of q and k, at most
LONGEST = 2  # of a key in the picture of the cosine, in √d_k
PAIRS = 4096  # behind what is said of cosines


@cache
def _pair() -> dict[str, Any]:
    """One query and one key: q·k, what the tanh is taken of, and v."""
    rng = np.random.default_rng(SEED)
    q, k = rng.standard_normal((2, D_K))
    w_q, w_k = rng.standard_normal((2, TERMS, D_K)) / math.sqrt(D_K)
    v = rng.standard_normal(TERMS) / math.sqrt(TERMS)
    return {"dot": float(q @ k), "inside": w_q @ q + w_k @ k, "v": v}


def _additive(growth: float) -> float:
    pair = _pair()
    return float(pair["v"] @ np.tanh(growth * pair["inside"]))


@cache
def _cosines() -> tuple[float, float]:
    """The spread of cosines of random pairs, and how they correlate with the scaled dot product."""
    q, k = np.random.default_rng(0).standard_normal((2, PAIRS, D_K)).astype(np.float32)
    cosine, scaled = pair_logits(q, k, "cosine"), pair_logits(q, k, 1 / math.sqrt(D_K))
    return float(cosine.std() / math.sqrt(D_K)), float(np.corrcoef(cosine, scaled)[0, 1])


def _spread(variance: float, error: float) -> tuple[float, float]:
    """A standard deviation with its error."""
    return math.sqrt(variance), error / (2 * math.sqrt(variance))


def _additive_spreads() -> list[tuple[float, float]]:
    found = claim("C13")
    pairs = zip(found["measured"]["score variance"], found["stderr"]["score variance"], strict=True)
    return [_spread(*pair) for pair in pairs]


def numbers() -> Mapping[str, Number]:
    race, bounded, parallel = claim("C13"), claim("C13a"), claim("C14")
    widths, lengths = race["params"]["d_k"], race["params"]["lengths"]
    (first, first_error), *_, (last, last_error) = _additive_spreads()
    times = race["measured"]["time of additive over dot product"]
    errors = race["stderr"]["time of additive over dot product"]
    here, pairs = f"seed {SEED}", f"{PAIRS} draws, seed 0"
    spread, correlation = _cosines()

    def parallel_number(name: str) -> Number:
        return claim_number("C14", parallel["measured"][name], 4, stderr=parallel["stderr"][name])

    return {
        "narrow": theory(widths[0], "chosen"),
        "wide": theory(widths[-1], "chosen"),
        "dot_times": theory(math.isqrt(widths[-1] // widths[0]), "√(1024/4)"),
        "additive_times": claim_number(
            "C13", last / first, 3, stderr=last / first * math.hypot(first_error / first, last_error / last)
        ),
        "additive_spread": claim_number("C13", last, stderr=last_error),
        "terms": theory(TERMS, "chosen"),
        "growth": theory(GROWTH, "chosen"),
        "dot": theory(_pair()["dot"], f"q·k, {here}"),
        "dot_grown": theory(GROWTH**2 * _pair()["dot"], f"16 q·k, {here}"),
        "additive": theory(_additive(1), f"vᵀ tanh(W_q q + W_k k), {here}"),
        "additive_grown": theory(_additive(GROWTH), f"vᵀ tanh(4 (W_q q + W_k k)), {here}"),
        "bound": theory(float(np.abs(_pair()["v"]).sum()), f"‖v‖₁, {here}"),
        "v_growth": theory(bounded["params"]["growths"][-1], "chosen"),
        "keys": theory(bounded["params"]["keys"], "C13a"),
        "top": claim_number("C13a", bounded["measured"]["top1"][0], stderr=bounded["stderr"]["top1"][0]),
        "top_grown": claim_number("C13a", bounded["measured"]["top1"][-1], stderr=bounded["stderr"]["top1"][-1]),
        "short": theory(lengths[0], "chosen"),
        "long": theory(lengths[-1], "chosen"),
        "time_short": claim_number("C13", times[0], stderr=errors[0]),
        "time_long": claim_number("C13", times[-1], stderr=errors[-1]),
        "tanhs": theory(race["params"]["width"], "C13"),
        "d_k": theory(D_K, "chosen"),
        "root": theory(math.isqrt(D_K), "√64"),
        "cosine_spread": live(spread, pairs),
        "cosine_law": theory(1 / math.sqrt(D_K), "1/√64", 3),
        "correlation": live(correlation, pairs),
        "power": parallel_number("exponent: 1/sqrt(d_k)"),
        "power_plain": parallel_number("exponent: none"),
        "speed_up": parallel_number("speed-up: 1/sqrt(d_k)"),
        "speed_up_plain": parallel_number("speed-up: none"),
    }


def data() -> Any:
    race, products = claim("C13"), claim("C1")["details"]
    widths: list[int] = race["params"]["d_k"]
    at = [products["d_k"].index(d_k) for d_k in widths]
    dot = [math.sqrt(products["variance"]["normal"][i]) for i in at]
    additive = _additive_spreads()
    return {
        "widths": widths,
        "dot": {"y": dot, "stderr": [y * products["log_error"]["normal"][i] / 2 for y, i in zip(dot, at, strict=True)]},
        "additive": {"y": [y for y, _ in additive], "stderr": [error for _, error in additive]},
        "law": [math.sqrt(x) for x in race["theory"]["score variance"]],
        "pair": _pair() | {"growth": GROWTH},
        "time": {
            "tokens": race["params"]["lengths"],
            "y": race["measured"]["time of additive over dot product"],
            "stderr": race["stderr"]["time of additive over dot product"],
        },
        "root": math.isqrt(D_K),
        "longest": LONGEST,
    }


CHAPTER = Chapter(
    "rivals",
    options=("same", "slower", "alike"),
    answer="same",
    claims=("C13", "C13a", "C14"),
    numbers=numbers,
    data=data,
    steps=4,
)
