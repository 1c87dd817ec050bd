"""A sentence through a model: its tokens, and the arguments of every layer's attention.

`capture` records them from a real model, `random_layer` computes them from random weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from levelhead.explanation.core_steps import AttentionCall
from levelhead.explanation.head_steps import Step
from levelhead.explanation.tokens import Tokens


@dataclass(frozen=True, eq=False)
class ForwardPass:
    model: str  # its name
    about: str  # what it is
    tokens: Tokens
    calls: tuple[AttentionCall, ...]  # by layer
    before: tuple[Step, ...] = ()  # how Q, K and V were computed, where that is shown
    after: tuple[Step, ...] = ()  # what follows the heads' outputs
    notes: tuple[str, ...] = ()
    ordered: bool = True  # whether the model has token positions

    @property
    def heads(self) -> int:
        return int(self.calls[0].q.shape[0])
