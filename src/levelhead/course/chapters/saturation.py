"""Chapter 5: what saturation costs. The slope of a weight is p(1 − p): a quarter at most, and nothing at both ends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from levelhead.course.chapter import Chapter
from levelhead.course.numbers import Number, live, theory
from levelhead.course.results import claim, claim_number, curve
from levelhead.lab.measure import logit_gradients

GAP = 6  # of the example
FIRST, WIDEST = 1, 12  # of the slider
LOGITS = (2, 0, -1)  # of the Jacobian that the samples compute
D_K = 64


def _jacobian(logits: tuple[float, ...]) -> np.ndarray[Any, Any]:
    """dp_i/ds_j by the core: the row is repeated, and line i has the gradient of weight i alone."""
    n = len(logits)
    queries, keys = np.ones((n, 1)), np.array(logits, dtype=np.float64)[:, None]
    _, found = logit_gradients(np.eye(n), queries, keys, 1.0)
    return found


def numbers() -> Mapping[str, Number]:
    p, half = 1 / (1 + math.exp(-GAP)), 1 / 2
    J, core = _jacobian(LOGITS), "levelhead, ∂p/∂s"
    widths, keys = claim("C5")["params"]["d_k"], claim("C5")["params"]["keys"]
    return {
        "gap": theory(GAP, "chosen"),
        "p": theory(p, "1/(1 + e⁻⁶)"),
        "slope": theory(p * (1 - p), "p(1 − p)"),
        "most": theory(half * (1 - half), "½ (1 − ½)"),
        "times": theory(half * (1 - half) / (p * (1 - p)), "¼ / p(1 − p)"),
        "half": theory(half, "argmax p(1 − p)"),
        **{f"s_{i}": theory(s, "chosen") for i, s in enumerate(LOGITS, 1)},
        "j_11": live(float(J[0, 0]), core),
        "j_12": live(float(J[0, 1]), core),
        "j_sum": live(float(np.trace(J)), core),
        "d_k": theory(D_K, "chosen"),
        "widest": theory(widths[-1], "chosen"),
        "keys": theory(keys, "C5"),
        "even_slope": theory((1 - 1 / keys) / keys, "(1 − 1/256)/256", 1),
        "even_sum": theory(1 - 1 / keys, "1 − 1/256", 3),
        "left_undivided": curve("C5", "gradient", D_K),
        "left_widest": curve("C5", "gradient", widths[-1]),
        "left_divided": curve("C11", "gradient", D_K),
        "left_divided_widest": curve("C11", "gradient", widths[-1]),
        "norm_peak": claim_number("C5", max(claim("C5")["details"]["jacobian"]["y"])),
        "norm_divided": claim_number("C11", claim("C11")["details"]["jacobian"]["y"][2]),
    }


def data() -> Any:
    curves = {name: claim(id)["details"]["gradient"] for name, id in (("nothing", "C5"), ("root", "C11"))}
    return {"first": FIRST, "widest": WIDEST, "curves": curves}


CHAPTER = Chapter(
    "saturation", options=("zero", "half", "one"), answer="half", claims=("C5", "C6", "C11"), numbers=numbers, data=data
)
