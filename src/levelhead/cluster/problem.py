"""An attention problem over a sequence, and the ways to split it over ranks."""

from __future__ import annotations

from dataclasses import dataclass

SPLITS = ("contiguous", "zigzag", "striped")
PASSES = ("forward", "train")  # train: forward and backward


@dataclass(frozen=True, slots=True)
class Problem:
    """One layer's attention over one sequence."""

    tokens: int  # keys of the whole sequence
    heads: int
    groups: int  # heads of keys and values
    width: int  # of keys and of values
    causal: bool = False
    queries: int | None = None  # that attend to all tokens; None: every token is one
    size: int = 4  # bytes of an element

    @property
    def rows(self) -> int:
        """Queries of the whole sequence."""
        return self.tokens if self.queries is None else self.queries

    @property
    def kv(self) -> int:
        """Elements of a token's keys and values."""
        return 2 * self.groups * self.width
