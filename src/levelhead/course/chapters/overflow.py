"""Chapter 7: what really overflows. exp of a large score does, in a softmax that nobody ships; the score itself can."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

from levelhead.course.chapter import Chapter
from levelhead.course.numbers import Number, theory
from levelhead.course.results import claim, claim_number
from levelhead.lab.rounding import LARGEST

D_K = 64
LARGE = 30  # a score that an undivided head of width 64 reaches: almost four of its standard deviations
FARTHEST = 120  # of the slider
TYPES = ("float16", "float32")
_HALF = 0.5  # a weight whose slope is steepest


@cache
def _naive() -> dict[str, dict[str, list[float]]]:
    """Share of rows that a softmax without a shift loses, by type: measured, standard error, theory."""
    found = claim("C8")
    return {name: {part: found[part][name] for part in ("measured", "stderr", "theory")} for name in TYPES}


def _growths() -> tuple[list[float], list[float], list[float], list[float]]:
    found, name = claim("C8a"), "float16 score infinite"
    return found["params"]["growths"], found["measured"][name], found["stderr"][name], found["theory"][name]


def numbers() -> Mapping[str, Number]:
    widths: list[int] = claim("C8")["params"]["d_k"]
    naive, (growths, lost, errors, _) = _naive(), _growths()
    half, single = (naive[name] for name in TYPES)
    at, wide, grown = widths.index(D_K), widths.index(1024), growths.index(64.0)
    keys = claim("C8")["params"]["keys"]
    return {
        "d_k": theory(D_K, "chosen"),
        "divisor": theory(math.isqrt(D_K), "√64"),
        "keys": theory(keys, "C8"),
        "large": theory(LARGE, "chosen"),
        "exp_large": theory(math.exp(LARGE), "e³⁰"),
        "largest_half": theory(int(LARGEST["float16"]), "float16"),
        "largest_single": theory(LARGEST["float32"], "float32"),
        "limit_half": theory(math.log(LARGEST["float16"]), "ln 65504", 3),
        "limit_single": theory(math.log(LARGEST["float32"]), "ln max float32", 3),
        "naive_half": claim_number("C8", half["measured"][at], stderr=half["stderr"][at]),
        "wide": theory(widths[wide], "chosen"),
        "naive_single": claim_number("C8", single["measured"][wide], stderr=single["stderr"][wide]),
        "quarter": theory(_HALF * (1 - _HALF), "½ (1 − ½)"),
        "bound": theory(claim("C8")["theory"]["steepest gradient (bound)"], "‖diag(p) − p pᵀ‖ ≤ 1/2"),
        "scale_most": claim_number("C8a", claim("C8a")["params"]["scales"][-1]),
        "core_lost": claim_number("C8a", max(claim("C8a")["measured"]["core"])),
        "nan_naive": theory(int(math.exp(LARGE) > LARGEST["float16"]), "e³⁰ > max float16"),
        "nan_shifted": theory(int(math.exp(0) > LARGEST["float16"]), "e⁰ < max float16"),
        "growth": theory(int(growths[grown]), "chosen"),
        "growth_lost": claim_number("C8a", lost[grown], stderr=errors[grown]),
    }


def data() -> Any:
    growths, lost, errors, law = _growths()
    return {
        "widths": claim("C8")["params"]["d_k"],
        "naive": _naive(),
        "grown": {"growths": growths, "measured": lost, "stderr": errors, "theory": law},
        "largest": {name: LARGEST[name] for name in TYPES},
        "large": LARGE,
        "farthest": FARTHEST,
    }


CHAPTER = Chapter(
    "overflow", options=("all", "half", "none"), answer="none", claims=("C8", "C8a"), numbers=numbers, data=data
)
