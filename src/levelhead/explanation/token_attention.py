"""Which keys a token attends to, in every head of a model, with and without the scale.

Counts and sorts weights that the core computed. The unscaled weights are those of the same queries and keys: the model
itself ran as it was trained; trained without the scale it would have other queries and keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from levelhead.explanation.head_steps import Array, rounded
from levelhead.explanation.tokens import Tokens
from levelhead.words import plural

SURE = 0.99  # a weight that leaves next to nothing for the other keys


@dataclass(frozen=True)
class Look:
    """One head's largest weights in the token's row: over all keys, and over other words."""

    layer: int
    head: int
    to: int
    weight: float
    word: int | None  # the key with the largest weight among other words; None: no other word is visible
    word_weight: float
    unscaled_to: int
    unscaled_weight: float


@dataclass(frozen=True)
class TokenAttention:
    """A `Look` for every head, the most weight on another word first."""

    token: int
    tokens: Tokens
    looks: tuple[Look, ...]
    others: str  # what counts as another word

    @property
    def name(self) -> str:
        return self.tokens.names[self.token]

    def named(self, to: int) -> str:
        """A token as seen from this one."""
        return "itself" if to == self.token else self.tokens.distinct[to]

    def cells(self, look: Look) -> tuple[tuple[str | None, float], ...]:
        """The key with the largest weight, the one without the scale, and the other word, each with its weight."""
        word = None if look.word is None else self.named(look.word)
        unscaled = (self.named(look.unscaled_to), look.unscaled_weight)
        return (self.named(look.to), look.weight), unscaled, (word, look.word_weight)

    def sentences(self) -> Iterator[str]:
        """The counts in words."""
        n = len(self.looks)
        yield f"{self.name} → {self._counted(look.to for look in self.looks)}."
        words = [look.word for look in self.looks if look.word is not None]
        if words:
            yield f"Counting {self.others} only: {self.name} → {self._counted(words)}."
        same = sum(look.to == look.unscaled_to for look in self.looks)
        columns = ([look.weight for look in self.looks], [look.unscaled_weight for look in self.looks])
        means = [sum(weights) / n for weights in columns]
        near = [sum(weight >= SURE for weight in weights) for weights in columns]
        yield (
            f"Unscaled, it is the same token in {same} of {n} heads, for a positive factor keeps "
            f"the order; what changes is how much it gets: {means[0]:.2f} on average, unscaled "
            f"{means[1]:.2f}; {SURE} or more in {plural(near[0], 'head')}, unscaled in {near[1]}."
        )
        yield (
            "Unscaled means the same queries and keys without the factor; a model trained without it would have others."
        )

    def _counted(self, keys: Iterable[int]) -> str:
        counts = Counter(keys).most_common()
        first, *rest = (f"{self.named(to)} in {n}" for to, n in counts)
        return ", ".join([f"{first} of {len(self.looks)} heads", *rest])

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {
                "layer": look.layer,
                "head": look.head,
                "to": self.named(look.to),
                "key": look.to,
                "weight": rounded(look.weight),
                "word": None if look.word is None else self.named(look.word),
                "word_weight": rounded(look.word_weight),
                "unscaled_to": self.named(look.unscaled_to),
                "unscaled_weight": rounded(look.unscaled_weight),
            }
            for look in self.looks
        ]


def attended(token: int, tokens: Tokens, layers: Iterable[tuple[Array, Array]], *, ordered: bool) -> TokenAttention:
    """From the weights (H, T, S) of every layer, with and without the scale.

    Where the model has positions, a token's neighbours and the first token do not count as other words: some heads
    attend one step aside, or to the start, whatever the words are.
    """
    others = [i for i in range(len(tokens)) if _counts(i, token, tokens, ordered)]
    looks = []
    for layer, (scaled, unscaled) in enumerate(layers):
        for head, (row, bare) in enumerate(zip(scaled[:, token], unscaled[:, token], strict=True)):
            word = max((i for i in others if row[i] > 0), key=row.__getitem__, default=None)
            to, bare_to = int(row.argmax()), int(bare.argmax())
            weight = 0.0 if word is None else float(row[word])
            looks.append(Look(layer, head, to, float(row[to]), word, weight, bare_to, float(bare[bare_to])))
    looks.sort(key=lambda look: -look.word_weight)
    meaning = "words beyond its neighbours" if ordered else "other words"
    return TokenAttention(token, tokens, tuple(looks), meaning)


def _counts(i: int, token: int, tokens: Tokens, ordered: bool) -> bool:
    """Whether token i counts as another word."""
    if i == token or tokens.special[i] or not any(c.isalnum() for c in tokens.names[i]):
        return False
    return not ordered or (i > 0 and abs(i - token) > 1)
