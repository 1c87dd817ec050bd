"""Chapter 3: one dot product is a sum of d_k random terms, a walk. Walks end about √d_k from where they began."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead.course.chapter import Chapter
from levelhead.course.numbers import Number, live, theory
from levelhead.course.results import claim, claim_number
from levelhead.lab.claims.c02_spread import THREE, TWO
from levelhead.lab.measure import pair_logits
from levelhead.lab.theory import logit_density

D_K, WIDER = 64, 256
WIDTHS = (4, 16, D_K, WIDER, 1024)  # of the histograms
PAIRS = 4096
ENTRIES = 1 << 20  # drawn for each side, at most: pairs of width 1024 are fewer
WALKS = 40
EDGES = np.linspace(-40, 40, 41)

Array = NDArray[np.float64]


def draw(d_k: int) -> tuple[Array, Array]:
    """Queries and keys, each used once; the samples draw the same numbers."""
    q, k = np.random.default_rng(d_k).standard_normal((2, _pairs(d_k), d_k))
    return q, k


def _pairs(d_k: int) -> int:
    return min(PAIRS, ENTRIES // d_k)


@cache
def _ends(d_k: int) -> Array:
    """Where the walks end: q·k of every pair, by the core."""
    return np.asarray(pair_logits(*draw(d_k), scale=1.0), np.float64)


@cache
def _walks() -> Array:
    q, k = draw(D_K)
    return np.cumsum(q[:WALKS] * k[:WALKS], axis=1)


def _error(d_k: int) -> float:
    """Standard error of the measured spread: a sum of d_k products of normal numbers has excess kurtosis 6/d_k."""
    return math.sqrt(d_k) * math.sqrt((2 + 6 / d_k) / _pairs(d_k)) / 2


def numbers() -> Mapping[str, Number]:
    here = f"levelhead, {PAIRS} pairs"
    spreads = {f"spread_{d_k}": live(_ends(d_k).std(), here, 3) for d_k in (D_K, WIDER)}
    errors = {f"error_{d_k}": theory(_error(d_k), "√(2 + 6/d_k) √d_k / (2 √pairs)", 1) for d_k in (D_K, WIDER)}
    return spreads | errors | _chosen() | _shares() | _recorded()


def _chosen() -> dict[str, Number]:
    return {
        "d_k": theory(D_K, "chosen"),
        "wider": theory(WIDER, "chosen"),
        "factor": theory(WIDER // D_K, "256 / 64"),
        "root_factor": theory(math.isqrt(WIDER // D_K), "√4"),
        "root": theory(math.isqrt(D_K), "√64"),
        "root_wider": theory(math.isqrt(WIDER), "√256"),
        "pairs": theory(PAIRS, "chosen"),
        "walks": theory(WALKS, "chosen"),
    }


def _shares() -> dict[str, Number]:
    walks = _walks()
    within = (np.abs(walks[:, -1]) <= math.sqrt(D_K)).sum()
    return {
        "first_end": live(walks[0, -1], "walk 1"),
        "within": live(int(within), f"{WALKS} walks"),
        "within_expected": theory(WALKS * math.erf(1 / math.sqrt(2)), "40 erf(1/√2)"),
        "within_theory": theory(math.erf(1 / math.sqrt(2)), "erf(1/√2)"),
    }


def _recorded() -> dict[str, Number]:
    slopes, examples, restored = claim("C1"), claim("C2"), claim("C3")
    parts = examples["measured"]["factor due to"]
    two, three = examples["measured"]["variance"]
    again = "Var of the scaled q·k, over a"
    middle = restored["params"]["a"].index(1.0)
    return {
        "slope": claim_number(
            "C1", slopes["measured"]["slope"]["normal"], 4, stderr=slopes["stderr"]["slope"]["normal"]
        ),
        "slope_error": claim_number("C1", slopes["stderr"]["slope"]["normal"], 1),
        "widest": claim_number("C1", int(slopes["params"]["d_k"][-1])),
        "values_changed": claim_number("C1a", int(claim("C1a")["measured"]["logits changed by V"])),
        "values_compared": claim_number("C1a", int(claim("C1a")["details"]["compared"])),
        "variance_two": claim_number("C2", two, 3),
        "variance_three": claim_number("C2", round(three)),
        "contrast": claim_number("C2", three / two, 4),
        "by_dimension": claim_number("C2", parts["dimension"], 2),
        "by_size": claim_number("C2", parts["size"], 2),
        "by_mean": claim_number("C2", parts["mean"], 2),
        "by_chance": claim_number("C2", parts["which entry met which"], 2),
        "largest_entry": claim_number("C2", int(THREE.max())),
        "restored": claim_number("C3", restored["measured"][again][middle], stderr=restored["stderr"][again][middle]),
        **{
            f"variance_{name}": claim_number("C3", a)
            for name, a in zip(("small", "middle", "large"), restored["params"]["a"], strict=True)
        },
        **{
            f"restored_{name}": claim_number(
                "C3", restored["measured"][again][at], stderr=restored["stderr"][again][at]
            )
            for name, at in (("small", 0), ("large", -1))
        },
        "restored_error": claim_number("C3", restored["stderr"][again][middle], 1),
    }


def data() -> Any:
    widths: list[int] = claim("C1")["details"]["d_k"]
    variance = np.array(claim("C1")["details"]["variance"]["normal"])
    return {
        "walks": _walks().round(2),
        "terms": np.diff(_walks(), prepend=0).round(2),
        "ends": [_histogram(d_k) for d_k in WIDTHS],
        "centres": (EDGES[1:] + EDGES[:-1]) / 2,
        "examples": [_example(pair, int(product)) for pair, product in _examples()],
        "spread": {
            "widths": widths,
            "measured": np.sqrt(variance),
            "error": np.sqrt(variance) * np.array(claim("C1")["details"]["log_error"]["normal"]) / 2,
        },
    }


def _examples() -> list[tuple[Array, float]]:
    """The pairs of vectors of C2, each with its recorded product."""
    return [
        one
        for pairs, row in zip((TWO, THREE), claim("C2")["measured"]["products"], strict=True)
        for one in zip(pairs, row, strict=True)
    ]


def _example(pair: Array, product: int) -> dict[str, Any]:
    q, k = pair.astype(int).tolist()
    return {"q": q, "k": k, "product": product}


def _histogram(d_k: int) -> dict[str, Any]:
    """Densities between EDGES, measured and in theory, and the shares of ends that lie beyond."""
    ends = _ends(d_k)
    density = np.histogram(ends, EDGES)[0] / (ends.size * np.diff(EDGES))
    return {
        "d_k": d_k,
        "pairs": ends.size,
        "density": density,
        "theory": logit_density(EDGES, d_k, 1.0),
        "left": float((ends < EDGES[0]).mean()),
        "right": float((ends > EDGES[-1]).mean()),
        "spread": float(ends.std()),
        "error": _error(d_k),
    }


CHAPTER = Chapter(
    "walk",
    options=("same", "root", "linear"),
    answer="root",
    claims=("C1", "C1a", "C2", "C3"),
    numbers=numbers,
    data=data,
    steps=5,
)
