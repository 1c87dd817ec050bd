"""A sentence through a model: its tokens, and every layer's attention call with its intermediate results.

`capture` records the calls of a real model, `random_layer` computes those of random weights. The core never forms the
weights: `levelhead.weights` reads them off it. Nothing here is a second implementation of attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from levelhead import stats
from levelhead.attention import observe
from levelhead.explanation.head_steps import Array, Gauge, Step
from levelhead.explanation.tokens import Tokens
from levelhead.weights import weights


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """The arguments of one call; `options` are those of `attention`."""

    q: Array  # (H, T, D), after any rotation
    k: Array  # (G, S, D)
    v: Array  # (G, S, E)
    scale: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def weights(self) -> Array:
        """(…, T, S): softmax(q kᵀ · scale), changed by the options."""
        return weights(self.q, self.k, self.scale, **self.options)

    def unscaled(self) -> AttentionCall:
        """The call with the same queries and keys, without the scale."""
        return replace(self, scale="none")

    def gauges(self) -> tuple[Gauge, ...]:
        """The level of each head."""
        heads = observe(self.q, self.k, scale=self.scale, **self.options).heads
        columns = (heads.normalised_entropy, heads.saturated, heads.mean_top1, heads.max_logit)
        rows = zip(*(np.atleast_1d(column).tolist() for column in columns), strict=True)
        return tuple(Gauge(stats.level(h, saturated), h, top1, top) for h, saturated, top1, top in rows)


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
