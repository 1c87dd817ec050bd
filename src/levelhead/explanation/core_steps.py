"""The intermediate results of an attention call, from the core: logits, weights, gauges.

The core never forms them, so each is the result of another call: a logit is the logsumexp of a row that sees one key,
the weights are the output for values that are the identity. The logits cost a call per key. Nothing here is a second
implementation of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from levelhead import stats
from levelhead.attention import attention, observe
from levelhead.explanation.head_steps import Array, Gauge


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
        keys = self.k.shape[-2]
        identity = np.broadcast_to(np.eye(keys, dtype=self.k.dtype), (*self.k.shape[:-2], keys, keys))
        return np.asarray(attention(self.q, self.k, identity, scale=self.scale, **self.options))

    def unscaled(self) -> Array:
        """The weights of the same queries and keys without the scale."""
        return replace(self, scale="none").weights()

    def gauges(self) -> tuple[Gauge, ...]:
        """The level of each head."""
        heads = observe(self.q, self.k, scale=self.scale, **self.options).heads
        columns = (heads.normalised_entropy, heads.saturated, heads.mean_top1, heads.max_logit)
        rows = zip(*(np.atleast_1d(column).tolist() for column in columns), strict=True)
        return tuple(Gauge(stats.level(h, saturated), h, top1, top) for h, saturated, top1, top in rows)


def logits(q: Array, k: Array, scale: Any, options_of: Callable[[int], dict[str, Any]] = lambda j: {}) -> Array:
    """(…, T, S): scale · q·k, changed by the options of each key's own call."""
    keys = range(k.shape[-2])
    return np.stack([observe(q, k[..., j : j + 1, :], scale=scale, **options_of(j)).logsumexp for j in keys], -1)
