"""One head, every step of it kept: what a terminal, a page or a drawing shows.

Holds numbers and the words that go with them. It computes no attention (`arrays` has the core do
that), and it does not know how it will look.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead import stats
from levelhead.explanation import option_words

__all__ = ["NUMBERED", "Array", "Gauge", "Head", "Step", "in_brackets", "numbers"]

Array = NDArray[Any]
NUMBERED = ("scores", "scaled", "weights", "weighted sum", "output")  # the five steps


def in_brackets(shape: tuple[int, ...]) -> str:
    """`[3 × 64]`; nothing for what has no shape."""
    return f"[{' × '.join(map(str, shape))}]" if shape else ""


@dataclass(frozen=True, eq=False)
class Step:
    """A line of the account: what there is now, its shape, how it came about."""

    name: str
    shape: tuple[int, ...]
    about: str
    values: Array | None = None  # where they are not a head's

    def to_json(self) -> dict[str, str]:
        return {"name": self.name, "shape": in_brackets(self.shape), "about": self.about}


@dataclass(frozen=True)
class Gauge:
    """Where a head's bubble stands, and the numbers behind it."""

    level: stats.Level
    normalised_entropy: float  # mean over rows of H/ln n; NaN where no row has two keys to weigh
    top1: float  # mean largest weight
    max_logit: float

    @property
    def bubble(self) -> float | None:
        """0 (flat) to 1 (saturated), 0.5 the middle; None: there is none."""
        place = stats.bubble(self.normalised_entropy, self.level)
        return None if place is None else place / 8

    @property
    def picture(self) -> str:
        return stats.gauge(self.normalised_entropy, self.level)

    def to_json(self) -> dict[str, Any]:
        found = {"normalised_entropy": self.normalised_entropy, "top1": self.top1}
        return {"level": self.level, "bubble": self.bubble, **numbers(found | {"max_logit": self.max_logit})}


@dataclass(frozen=True, eq=False)
class Head:
    """softmax(Q Kᵀ · scale) V for T queries and S keys, with everything in between."""

    name: str
    q: Array  # (T, D)
    k: Array  # (S, D)
    v: Array  # (S, E)
    scores: Array  # (T, S), Q Kᵀ
    scaled: Array  # (T, S), times the scale
    logits: Array  # (T, S), what enters the softmax: capped, biased, -inf where hidden
    weights: Array  # (T, S)
    output: Array  # (T, E), the bits of `attention`
    unscaled: Array  # (T, S), the weights there would be without the scale
    queries: tuple[str, ...]  # the tokens' names
    keys: tuple[str, ...]
    scale: str  # "÷ √64"
    changes: tuple[str, ...]  # what happens between scale and softmax: "causal", "softcap 30.0" …
    gauge: Gauge
    unscaled_gauge: Gauge

    @property
    def inputs(self) -> list[Step]:
        """Q, K and V; in one line where they are alike."""
        shapes = {"Q": self.q.shape, "K": self.k.shape, "V": self.v.shape}
        if len(set(shapes.values())) == 1:
            return [Step("Q K V", self.q.shape, "queries, keys and values of this head")]
        abouts = {"Q": "what each token asks for", "K": "what it is asked by", "V": "what it says"}
        return [Step(name, shape, abouts[name]) for name, shape in shapes.items()]

    @property
    def steps(self) -> list[Step]:
        """The five steps; a sixth where something happens between scale and softmax."""
        pairs = self.scores.shape
        looks = "a row is the token that looks, a column the token looked at"
        meant = "; ".join(f"{change}: {option_words.meaning(change)}" for change in self.changes)
        changed = [Step("masked", pairs, meant)] if self.changes else []
        return [
            Step("scores", pairs, f"Q Kᵀ; {looks}"),
            Step("scaled", pairs, f"scores {self.scale}"),
            *changed,
            Step("weights", pairs, "softmax of each row; every row adds up to 1"),
            Step("weighted sum", self.v.shape[1:], "of the rows of V, with one row of weights"),
            Step("output", self.output.shape, "weights V: that sum for every token; its first columns"),
        ]

    def values(self, step: str) -> Array:
        """The numbers of a step that is a table."""
        found: Array = self.logits if step == "masked" else getattr(self, step)
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain lists; -inf, a hidden key, is None."""
        kept = ("q", "k", "v", "scores", "scaled", "logits", "weights", "output", "unscaled")
        return {
            "name": self.name,
            "queries": list(self.queries),
            "keys": list(self.keys),
            "scale": self.scale,
            "changes": list(self.changes),
            "steps": [step.to_json() for step in (*self.inputs, *self.steps)],
            "gauge": self.gauge.to_json(),
            "unscaled_gauge": self.unscaled_gauge.to_json(),
            **{name: numbers(getattr(self, name)) for name in kept},
        }


def numbers(value: Any) -> Any:
    """Seven digits, what float32 holds; what is not finite is None, for JSON has no word for it."""
    if isinstance(value, dict):
        return {name: numbers(x) for name, x in value.items()}
    if isinstance(value, np.ndarray) and value.ndim:
        return [numbers(x) for x in value]
    return float(f"{value:.7g}") if np.isfinite(value) else None
