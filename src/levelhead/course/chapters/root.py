"""Chapter 4: why the root, not d_k, and not the root of the model's width. Var(q·k / d_k^p) = d_k^(1 − 2p)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead import stats
from levelhead.attention import observe
from levelhead.course.chapter import Chapter
from levelhead.course.numbers import Number, live, theory
from levelhead.course.results import claim, claim_number
from levelhead.lab.figures import parts

QUERIES, KEYS = 64, 256
SEED = 0
BEGINS = 0.25  # the exponent at which the slider stands first


@dataclass(frozen=True)
class Model:
    """A width that heads share between them."""

    width: int
    heads: int

    @property
    def d_k(self) -> int:
        return self.width // self.heads

    def divisors(self) -> dict[str, float]:
        return {"nothing": 1.0, "root": math.sqrt(self.d_k), "width": self.d_k, "model": math.sqrt(self.width)}


MODELS = {"small": Model(512, 8), "large": Model(12288, 96)}  # the first Transformer, and GPT-3


@cache
def _logits(name: str) -> NDArray[np.float64]:
    """q·k of every query and every key; the samples draw the same numbers."""
    rng = np.random.default_rng(SEED)
    d_k = MODELS[name].d_k
    q, k = rng.standard_normal((QUERIES, d_k)), rng.standard_normal((KEYS, d_k))
    logits: NDArray[np.float64] = q @ k.T
    return logits


@cache
def _measured(name: str) -> dict[str, dict[str, Any]]:
    """By divisor: the spread of the scores, the mean of H/ln n, the gauge. A score is a key of width 1 for query 1."""
    found = {}
    for divisor, value in MODELS[name].divisors().items():
        rows = observe(np.ones((QUERIES, 1, 1)), _logits(name)[:, :, None], scale=1 / value).rows
        gauge = parts.gauge_of("", rows)
        found[divisor] = {
            "divisor": value,
            "spread": float(_logits(name).std() / value),
            "entropy": gauge.normalised_entropy,
            "gauge": {"level": gauge.level, "bubble": gauge.bubble, "normalised_entropy": gauge.normalised_entropy},
        }
    return found


def _typical_row(name: str) -> NDArray[np.float64]:
    """Of the query whose weights are the middle ones where the slider begins: an outlier would look sharper than all
    rows do on the mean."""
    logits = _logits(name)
    p = np.exp((logits - logits.max(-1, keepdims=True)) / MODELS[name].d_k ** BEGINS)
    p /= p.sum(-1, keepdims=True)
    middle: NDArray[np.float64] = logits[np.argsort((p**2).sum(-1))[QUERIES // 2]]
    return middle


def numbers() -> Mapping[str, Number]:
    found: dict[str, Number] = {"keys": theory(KEYS, "chosen"), "queries": theory(QUERIES, "chosen")}
    here = f"levelhead, {QUERIES} queries, {KEYS} keys"
    for name, model in MODELS.items():
        found |= {
            f"d_{name}": theory(model.width, "chosen"),
            f"heads_{name}": theory(model.heads, "chosen"),
            f"d_k_{name}": theory(model.d_k, f"{model.width} / {model.heads}"),
            f"root_{name}": theory(math.sqrt(model.d_k), f"√{model.d_k}", 3),
            f"model_{name}": theory(math.sqrt(model.width), f"√{model.width}", 3),
            f"over_{name}": theory(math.sqrt(model.heads), f"√{model.heads}"),
        }
        for divisor, one in _measured(name).items():
            found[f"spread_{divisor}_{name}"] = live(one["spread"], here, 3)
            found[f"entropy_{divisor}_{name}"] = live(one["entropy"], here)
    return found | _recorded()


def _recorded() -> dict[str, Number]:
    flat, width, level = claim("C9"), claim("C10"), claim("C11")
    at = flat["params"]["d_k"].index(MODELS["small"].d_k)
    heads = width["details"]["heads"].index(MODELS["large"].heads)
    spread, error = (width[part]["logit std"][heads] for part in ("measured", "stderr"))
    return {
        "flat_top": claim_number("C9", flat["details"]["top1"]["y"][at]),
        "equal": theory(1 / flat["params"]["keys"], "1/256"),
        "level_top": claim_number("C11", level["measured"]["top1"][at]),
        "spread_heads": claim_number("C10", spread, 3, stderr=error),
        "spread_heads_error": claim_number("C10", error, 1),
        "spread_heads_theory": theory(1 / math.sqrt(MODELS["large"].heads), "1/√96", 3),
        "narrowest": claim_number("C11", int(level["params"]["d_k"][0])),
        "widest": claim_number("C11", int(level["params"]["d_k"][-1])),
        "drift": claim_number("C11", 100 * level["details"]["drift"]["entropy"]),
        "flat_bound": theory(stats.FLAT, "levelhead.stats.FLAT"),
    }


def data() -> Any:
    whole = math.log(claim("C9")["params"]["keys"])
    bare, flat, level = claim("C5"), claim("C9"), claim("C11")
    spreads = {
        "nothing": level["details"]["unscaled"]["std"],
        "root": level["details"]["std"],
        "width": flat["details"]["std"],
    }
    return {
        "models": {
            name: {
                "width": model.width,
                "heads": model.heads,
                "d_k": model.d_k,
                "row": _typical_row(name),
                "divisors": _measured(name),
                "recorded": _model_spread(model.heads),
            }
            for name, model in MODELS.items()
        },
        "begins": BEGINS,
        "spreads": spreads,
        "entropies": {
            "nothing": _entropy(bare, whole),
            "root": _entropy(level, whole),
            "width": {"x": flat["params"]["d_k"]}
            | {to: flat[part]["H/ln n"] for to, part in (("y", "measured"), ("stderr", "stderr"), ("law", "theory"))},
        },
        "bounds": {"sharp": stats.SHARP, "flat": stats.FLAT},
    }


def _entropy(found: Mapping[str, Any], whole: float) -> dict[str, Any]:
    """H/ln n over d_k of a claim that keeps H."""
    names = (("y", "measured"), ("stderr", "stderr"), ("law", "theory"))
    values = {to: [x / whole for x in found[part]["entropy"]] for to, part in names}
    return {"x": found["params"]["d_k"], **values}


def _model_spread(heads: int) -> dict[str, float]:
    """C10's measurement with so many heads: the spread divided by √d at its one d_k."""
    width = claim("C10")
    at = width["details"]["heads"].index(heads)
    return {
        "d_k": width["params"]["d_k"],
        "spread": width["measured"]["logit std"][at],
        "error": width["stderr"]["logit std"][at],
    }


CHAPTER = Chapter(
    "root",
    options=("sharp", "same", "flat"),
    answer="flat",
    claims=("C9", "C10", "C11"),
    numbers=numbers,
    data=data,
    steps=3,
)
