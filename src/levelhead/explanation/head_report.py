"""What is shown of one head: the same in a terminal, a file and a notebook."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from levelhead.explanation.head_steps import Head, Step
from levelhead.explanation.token_attention import TokenAttention


@dataclass(frozen=True, eq=False)
class HeadReport:
    title: str
    about: str
    head: Head
    notes: tuple[str, ...] = ()
    before: tuple[Step, ...] = ()  # how Q, K and V were computed
    after: tuple[Step, ...] = ()  # what follows the output
    token: int | None = None  # the row shown in most detail
    attended: TokenAttention | None = None

    @property
    def inputs(self) -> tuple[Step, ...]:
        """What comes before the scores."""
        return self.before or tuple(self.head.inputs)

    @property
    def row(self) -> int:
        """The row that is written out in words: the token's, or else the first."""
        return self.token or 0

    def sum_in_words(self, most: int = 4) -> str:
        """The weighted sum of one row: "it = 0.43 v(dog) + …"."""
        weights, name = self.head.weights[self.row], self.head.queries[self.row]
        if np.isnan(weights).any():
            return f"{name} = NaN"
        order = weights.argsort(kind="stable")[::-1][:most]
        terms = [f"{weights[j]:.2f} v({self.head.keys[j]})" for j in order if weights[j] >= 0.005]
        if (smaller := int((weights > 0).sum()) - len(terms)) > 0:
            terms.append(f"{smaller} smaller")
        return f"{name} = {' + '.join(terms) or '0: no key is seen'}"
