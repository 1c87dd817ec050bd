"""What is told of one head: the same in a terminal, a file and a notebook."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from levelhead.explanation.head_steps import Head, Step
from levelhead.explanation.token_attention import TokenAttention

__all__ = ["HeadReport"]


@dataclass(frozen=True, eq=False)
class HeadReport:
    title: str
    about: str
    head: Head
    notes: tuple[str, ...] = ()
    before: tuple[Step, ...] = ()  # how Q, K and V came about
    after: tuple[Step, ...] = ()  # what becomes of the output
    token: int | None = None  # whose row is looked at most closely
    attended: TokenAttention | None = None

    @property
    def inputs(self) -> tuple[Step, ...]:
        """What comes before the scores."""
        return self.before or tuple(self.head.inputs)

    @property
    def row(self) -> int:
        """The row that is told in words: the token's, or else the first."""
        return 0 if self.token is None else self.token

    def sum_in_words(self, most: int = 4) -> str:
        """The weighted sum of one row: "it = 0.43 v(dog) + …"."""
        weights, name = self.head.weights[self.row], self.head.queries[self.row]
        if np.isnan(weights).any():
            return f"{name} = NaN"
        order = weights.argsort(kind="stable")[::-1][:most]
        terms = [f"{weights[j]:.2f} v({self.head.keys[j]})" for j in order if weights[j] >= 0.005]
        seen = int((weights > 0).sum())
        rest = [f"{seen - len(terms)} smaller"] if seen > len(terms) else []
        return f"{name} = {' + '.join([*terms, *rest]) or '0: no key is seen'}"
