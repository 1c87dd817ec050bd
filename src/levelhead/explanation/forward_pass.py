"""A sentence as a model reads it: its tokens, and what every layer's attention was asked.

What `capture` (a real model) and `random` (random weights) have in common.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from levelhead.explanation import core_steps
from levelhead.explanation.head_steps import Array, Gauge, Step
from levelhead.explanation.tokens import Tokens

__all__ = ["ForwardPass", "LayerCall"]


@dataclass(frozen=True, eq=False)
class LayerCall:
    """What one layer's attention was asked."""

    q: Array  # (H, T, D), after any rotation
    k: Array  # (G, S, D)
    v: Array  # (G, S, E)
    scale: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def weights(self) -> Array:
        return core_steps.weights(self.q, self.k, self.scale, **self.options)

    def unscaled(self) -> Array:
        """The weights the same queries and keys would have without the scale."""
        return core_steps.weights(self.q, self.k, "none", **self.options)

    def gauges(self) -> tuple[Gauge, ...]:
        return core_steps.gauges(self.q, self.k, self.scale, **self.options)


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """A sentence, read."""

    model: str  # its name
    about: str  # what it is
    tokens: Tokens
    calls: tuple[LayerCall, ...]  # by layer
    before: tuple[Step, ...] = ()  # how Q, K and V came about, where that is shown
    after: tuple[Step, ...] = ()  # what becomes of the heads' outputs
    notes: tuple[str, ...] = ()
    ordered: bool = True  # whether the model knows where in the sentence a token stands

    @property
    def heads(self) -> int:
        return int(self.calls[0].q.shape[0])
