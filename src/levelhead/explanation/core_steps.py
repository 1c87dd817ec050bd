"""The intermediate results of an attention call, from the core: logits, weights, gauges.

The core never forms them, so each is the result of another call: a logit is the logsumexp of a row that sees one key,
the weights are the output for values that are the identity. The logits cost a call per key. Nothing here is a second
implementation of attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from levelhead import _core, stats
from levelhead.attention import observe
from levelhead.call.options import Scoring, shape_of
from levelhead.call.prepare import for_core
from levelhead.explanation.head_steps import Array, Gauge
from levelhead.state import unwritten
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

    def unscaled(self) -> Array:
        """The weights of the same queries and keys without the scale."""
        return replace(self, scale="none").weights()

    def gauges(self) -> tuple[Gauge, ...]:
        """The level of each head."""
        heads = observe(self.q, self.k, scale=self.scale, **self.options).heads
        columns = (heads.normalised_entropy, heads.saturated, heads.mean_top1, heads.max_logit)
        rows = zip(*(np.atleast_1d(column).tolist() for column in columns), strict=True)
        return tuple(Gauge(stats.level(h, saturated), h, top1, top) for h, saturated, top1, top in rows)


def logits(q: Array, k: Array, scoring: Scoring, *, scale_only: bool = False) -> Array:
    """(…, T, S): what enters the softmax, or the scaled scores alone.

    Each is the logsumexp of a call whose only key sits at its own position.
    """
    T, S = q.shape[-2], k.shape[-2]
    shape = shape_of(q.shape, k.shape, None)
    if scoring.log_n:  # a call of one key would count n = 1
        n = np.maximum(scoring.visible(np.arange(T), np.arange(S)).sum(-1), 1).reshape(T, 1)
        q, scoring = q * np.log(n).astype(q.dtype), scoring._replace(log_n=False)
    scoring = Scoring(scoring.scale, cosine=scoring.cosine) if scale_only else scoring._replace(sinks=None, dropout=0.0)
    keywords = for_core(scoring, shape)
    columns = []
    for j in range(S):
        own = {name: np.ascontiguousarray(keywords[name][..., j : j + 1]) for name in _BY_KEY if name in keywords}
        state = unwritten(q.shape[:-1], None, q.dtype, 1)
        into: dict[str, Any] = {"sums": state.sums, "counts": state.counts, "key_runs": [(j, 1, 1)]}
        _core.forward(q, k[..., j : j + 1, :], None, threads=1, **{**keywords, **own}, **into)
        columns.append(stats.rows(state.sums, state.counts, None).logsumexp.astype(q.dtype))
    return np.stack(columns, -1)


_BY_KEY = ("mask", "key_segments")  # keywords whose last axis is that of the keys
