"""One head with every step kept: the numbers, and the words that go with them.

It computes no attention (`arrays` calls the core) and has no layout (`terminal`, `html`, `svg`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead import stats
from levelhead.explanation import option_words
from levelhead.json_numbers import json_value

Array = NDArray[Any]
_NUMBERED = ("scores", "scaled", "weights", "weighted sum", "output")


def in_brackets(shape: tuple[int, ...]) -> str:
    """`[3 × 64]`; empty for a scalar."""
    return f"[{' × '.join(map(str, shape))}]" if shape else ""


@dataclass(frozen=True, eq=False)
class Step:
    """A result on the way: its name, its shape, how it was computed."""

    name: str
    shape: tuple[int, ...]
    about: str
    values: Array | None = None  # where `Head` does not hold them

    @property
    def number(self) -> str:
        """ "3. " for the third of the five steps; empty for any other."""
        return f"{_NUMBERED.index(self.name) + 1}. " if self.name in _NUMBERED else ""

    def to_json(self) -> dict[str, str]:
        return {"name": self.name, "shape": in_brackets(self.shape), "about": self.about}


@dataclass(frozen=True)
class Gauge:
    """A head's level, and the numbers behind it."""

    level: stats.Level
    normalised_entropy: float  # mean over rows of H/ln n; NaN where no row sees two keys
    top1: float  # mean largest weight
    max_logit: float

    @property
    def bubble(self) -> float | None:
        """0 (flat) to 1 (saturated), 0.5 the middle; None without a level."""
        position = stats.bubble(self.normalised_entropy, self.level)
        return None if position is None else position / 8

    @property
    def picture(self) -> str:
        return stats.gauge(self.normalised_entropy, self.level)

    def to_json(self) -> dict[str, Any]:
        numbers = {name: rounded(x) for name, x in asdict(self).items() if name != "level"}
        return {"level": self.level, "bubble": self.bubble, **numbers}


@dataclass(frozen=True, eq=False)
class StepArrays:
    """softmax(Q Kᵀ · scale) V for T queries and S keys, with everything in between; several heads have their axis in
    front."""

    q: Array  # (T, D)
    k: Array  # (S, D)
    v: Array  # (S, E)
    scores: Array  # (T, S), Q Kᵀ
    scaled: Array  # (T, S), times the scale
    logits: Array  # (T, S), the input of the softmax: capped, biased, -inf where hidden
    weights: Array  # (T, S)
    output: Array  # (T, E), the bits of `attention`
    unscaled: Array  # (T, S), the weights without the scale

    def arrays(self) -> dict[str, Array]:
        """All of them, by name."""
        return {field.name: getattr(self, field.name) for field in fields(StepArrays)}


@dataclass(frozen=True, eq=False)
class Head(StepArrays):
    """One head, with the words that go with its numbers."""

    name: str
    queries: tuple[str, ...]  # the tokens' names
    keys: tuple[str, ...]
    scale: str  # "÷ √64"
    changes: tuple[str, ...]  # what happens between scale and softmax: "causal", "window" …
    gauge: Gauge
    unscaled_gauge: Gauge

    @property
    def inputs(self) -> list[Step]:
        """Q, K and V; one step where their shapes are equal."""
        shapes = {"Q": self.q.shape, "K": self.k.shape, "V": self.v.shape}
        if len(set(shapes.values())) == 1:
            return [Step("Q K V", self.q.shape, "queries, keys and values of this head")]
        abouts = {"Q": "what each token asks for", "K": "what each token offers", "V": "what it says"}
        return [Step(name, shape, abouts[name]) for name, shape in shapes.items()]

    @property
    def steps(self) -> list[Step]:
        """The five steps; a sixth where something happens between scale and softmax."""
        pairs = self.scores.shape
        looks = "a row is the token that looks, a column the token looked at"
        meaning = "; ".join(f"{change}: {option_words.meaning(change)}" for change in self.changes)
        return [
            Step("scores", pairs, f"Q Kᵀ; {looks}"),
            Step("scaled", pairs, f"scores {self.scale}"),
            *([Step("masked", pairs, meaning)] if self.changes else []),
            Step("weights", pairs, "softmax of each row; every row adds up to 1"),
            Step("weighted sum", self.v.shape[1:], "of the rows of V, with one row of weights"),
            Step("output", self.output.shape, "weights V: that sum for every token; its first columns"),
        ]

    @property
    def boxes(self) -> list[tuple[str, str]]:
        """The boxes of the block diagram before the last product, each with its result."""
        pairs = in_brackets(self.scores.shape)
        mask = ", ".join(self.changes)
        return [
            ("MatMul  Q Kᵀ", f"scores {pairs}"),
            (f"Scale  {self.scale}", f"scaled {pairs}"),
            (f"Mask  {mask}", f"masked {pairs}") if mask else ("(Mask  nothing is hidden)", f"as before {pairs}"),
            ("SoftMax  of each row", f"weights {pairs}"),
        ]

    @property
    def sides(self) -> tuple[tuple[str, Array, Gauge], tuple[str, Array, Gauge]]:
        """Title, weights and gauge, with the scale and without."""
        return ((f"scores {self.scale}", self.weights, self.gauge), ("unscaled", self.unscaled, self.unscaled_gauge))

    def values(self, step: str) -> Array:
        """The numbers of a step that is a table."""
        array: Array = self.logits if step == "masked" else getattr(self, step)
        return array

    def table(self, step: str) -> tuple[Array, Array]:
        """The numbers of a step as shown, and the weights that shade them: scores are shaded by their unscaled softmax.

        A hidden key has no weight, which is not the same as a small one: it is -inf here.
        """
        values = self.values(step)
        if step == "weights":
            values = np.where(self.logits == -np.inf, -np.inf, values)
        return values, self.unscaled if step == "scores" else self.weights

    def to_json(self) -> dict[str, Any]:
        """Plain lists; a hidden key, -inf, is None."""
        return {
            "name": self.name,
            "queries": list(self.queries),
            "keys": list(self.keys),
            "scale": self.scale,
            "changes": list(self.changes),
            "steps": [step.to_json() for step in (*self.inputs, *self.steps)],
            "gauge": self.gauge.to_json(),
            "unscaled_gauge": self.unscaled_gauge.to_json(),
            **{name: rounded(array) for name, array in self.arrays().items()},
        }


def rounded(value: Any) -> Any:
    """JSON values with seven digits, the precision of float32; None for what is not finite."""
    return json_value(value, digits=7)
