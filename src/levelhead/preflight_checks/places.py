"""Which numbers of a module's tensor belong to which row and token of the batch. What is not sure is None."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from levelhead.preflight_checks.passes import Places


@dataclass(frozen=True)
class Grid:
    """The rows and tokens of a batch."""

    rows: int
    tokens: int

    @property
    def clear(self) -> bool:
        """Whether the two can be told apart by their sizes."""
        return self.rows != self.tokens

    def by_token(self, x: Tensor) -> Tensor | None:
        """The tensor as (rows, tokens, rest)."""
        B, T = self.rows, self.tokens
        lead = tuple(x.shape[:2])
        if x.dim() >= 3 and lead == (B, T):
            return x.reshape(B, T, -1)
        if x.dim() >= 3 and lead == (T, B):
            return x.transpose(0, 1).reshape(B, T, -1)
        if x.dim() == 4 and x.shape[0] == B and x.shape[2] == T and x.shape[1] not in (B, T):  # (B, heads, T, D)
            return x.movedim(2, 1).reshape(B, T, -1)
        if x.dim() == 2 and x.shape[0] == B * T and B * T not in (B, T):
            return x.reshape(B, T, -1)
        return None

    def by_row(self, x: Tensor) -> Tensor | None:
        """The tensor as (rows, rest)."""
        tokens = self.by_token(x)
        if tokens is not None:
            return tokens.reshape(self.rows, -1)
        each_with_each = x.dim() > 1 and x.shape[1] == self.rows  # of all pairs of rows, as contrastive models give
        if x.dim() >= 2 and x.shape[0] == self.rows > 1 and not each_with_each:
            return x.reshape(self.rows, -1)
        return None

    def at(self, chosen: Tensor) -> Places:
        """The numbers of the tokens (rows, tokens) that are True."""

        def places(x: Tensor) -> Tensor | None:
            found = self.by_token(x)
            return None if found is None else found[chosen.to(found.device)]

        return places

    def of_rows(self, row: int, *, own: bool) -> Places:
        """The numbers of one row, or of all others."""

        def places(x: Tensor) -> Tensor | None:
            found = self.by_row(x)
            return None if found is None else found[(torch.arange(self.rows, device=found.device) == row) == own]

        return places

    def token(self, t: int) -> Tensor:
        """(rows, tokens): True at one token of every row."""
        chosen = torch.zeros(self.rows, self.tokens, dtype=torch.bool)
        chosen[:, t] = True
        return chosen

    def before(self, t: int) -> Tensor:
        """(rows, tokens): True at all earlier tokens."""
        chosen = torch.zeros(self.rows, self.tokens, dtype=torch.bool)
        chosen[:, :t] = True
        return chosen
