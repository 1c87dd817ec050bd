"""Chapter 2: softmax sees gaps. Four rows of logits, and rows of the reader's own, which the browser computes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from levelhead import reference, stats
from levelhead.course.chapter import Chapter
from levelhead.course.numbers import Number, shown, theory

ROWS = ((7, 3), (4, 5), (1, 10), (25, 2, -3))
SHIFT = 100
DIVISOR = math.isqrt(64)
LOW, HIGH = -10, 25  # of the reader's own logits
FEWEST, MOST = 2, 5


def softmax(logits: tuple[float, ...]) -> list[float]:
    """By the definition, in float64: a head of width 1 whose query is 1."""
    keys = np.array(logits, dtype=np.float64)[:, None]
    output = reference.attention(np.ones((1, 1)), keys, np.eye(len(logits)), scale=1.0)
    return [float(x) for x in output[0]]


def numbers() -> Mapping[str, Number]:
    found: dict[str, Number] = {}
    for row, letter in zip(ROWS, "abcd", strict=True):
        formula = f"softmax({', '.join(map(str, row))})"
        for i, (logit, weight) in enumerate(zip(row, softmax(row), strict=True), 1):
            found[f"{letter}_{i}"] = theory(logit, "chosen")
            found[f"p_{letter}_{i}"] = theory(weight, formula)
    a, b, c, _ = ROWS
    return found | {
        "gap_a": theory(a[0] - a[1], "7 − 3"),
        "ratio_a": theory(math.exp(a[0] - a[1]), "e⁴"),
        "gap_b": theory(b[1] - b[0], "5 − 4"),
        "ratio_b": theory(math.exp(b[1] - b[0]), "e"),
        "gap_c": theory(c[1] - c[0], "10 − 1"),
        "ratio_c": theory(math.exp(c[1] - c[0]), "e⁹", 4),
        "rest_d": theory(1 - softmax(ROWS[3])[0], "softmax(25, 2, -3)"),
        "shift": theory(SHIFT, "chosen"),
        "flat": theory(stats.FLAT, "levelhead.stats.FLAT"),
        "sharp": theory(stats.SHARP, "levelhead.stats.SHARP"),
        "saturated": theory(stats.SATURATED, "levelhead.stats.SATURATED"),
        "saturated_row": theory(stats.SATURATED_ROW, "levelhead.stats.SATURATED_ROW"),
        "a_1_shifted": theory(a[0] + SHIFT, "7 + 100"),
        "a_2_shifted": theory(a[1] + SHIFT, "3 + 100"),
        "divisor": theory(DIVISOR, "√64"),
        "gap_c_divided": theory((c[1] - c[0]) / DIVISOR, "9 / 8"),
        "ratio_c_divided": theory(math.exp((c[1] - c[0]) / DIVISOR), "e^(9/8)"),
    }


def data() -> Any:
    rows = [{"logits": row, "weights": softmax(row), "texts": [shown(p) for p in softmax(row)]} for row in ROWS]
    return {"rows": rows, "low": LOW, "high": HIGH, "fewest": FEWEST, "most": MOST, "shift": SHIFT}


CHAPTER = Chapter(
    "softmax", options=("same", "larger", "smaller"), answer="same", claims=("C4",), numbers=numbers, data=data
)
