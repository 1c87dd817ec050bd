"""Multi-head attention without PyTorch and without gradients: project, attend, project back, in NumPy.

The weights have the names and shapes of `levelhead.torch.MultiHeadAttention`, which gives the same numbers from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead.attention import attention
from levelhead.call.options import PER_CALL, PerCallOptions, documented, known
from levelhead.call.prepare import existing_tokens
from levelhead.errors import bad_value
from levelhead.observation import Unpack

Array = NDArray[Any]
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
NORM_EPSILON = 1e-6  # of the squares' mean, where queries and keys are normalised


@dataclass
class KeyValueCache:
    """Keys and values of the tokens so far, (..., kv heads, tokens, width)."""

    keys: Any = None
    values: Any = None

    @property
    def length(self) -> int:
        """How many tokens it holds."""
        return 0 if self.keys is None else int(self.keys.shape[-2])


@dataclass(frozen=True)
class MultiHeadAttention:
    """out_proj(attention(q_proj(x), k_proj(y), v_proj(y))), heads side by side in the last axis.

    Args:
        weights: "q_proj.weight" (heads · width, in), "k_proj.weight", "v_proj.weight",
            "out_proj.weight"; their ".bias" where there is one; "q_norm.weight" and "k_norm.weight"
            (width,) for queries and keys that are normalised first; "sinks" (heads,).
        heads: query heads.
        kv_heads: key/value heads, shared by heads / kv_heads query heads each; None: heads.
        rotary: the base of rotary positions, such as 10000.0; None: no rotation.
        options: of `attention`, for every call.
    """

    weights: Mapping[str, Array]
    heads: int
    kv_heads: int | None = None
    rotary: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        missing = [f"{x}.weight" for x in _PROJECTIONS if f"{x}.weight" not in self.weights]
        if missing:
            raise bad_value("weights", "all four projections", f"none for {missing}", "Add them")
        for name, heads in (("q_proj", self.heads), ("k_proj", self.kv_heads or self.heads)):
            rows = self.weights[f"{name}.weight"].shape[0]
            if heads < 1 or rows % heads:
                raise bad_value("weights", f"{name}.weight with a multiple of {heads} rows", rows, "Check the heads")

    @documented(PER_CALL)
    def __call__(
        self,
        query: Array,
        key: Array | None = None,
        value: Array | None = None,
        *,
        cache: KeyValueCache | None = None,
        **options: Unpack[PerCallOptions],
    ) -> Array:
        """(..., T, in) to (..., T, out); keys and values are the query's unless given.

        With a cache, `query` holds new tokens, which are appended and see those before them.

        Args:
            {options}
        """
        known("__call__", options, PER_CALL)
        key = query if key is None else key
        value = key if value is None else value
        groups = self.kv_heads or self.heads
        q = self._normalised("q_norm", self._heads("q_proj", query, self.heads))
        k = self._normalised("k_norm", self._heads("k_proj", key, groups))
        v = self._heads("v_proj", value, groups)
        q, k, v = continued(q, k, v, cache, self.rotary, np)
        out = attention(q, k, v, sinks=self.weights.get("sinks"), **{**self.options, **options})
        projected = self._projected("out_proj", np.swapaxes(out, -3, -2).reshape(*query.shape[:-1], -1))
        exists = existing_tokens("query_lengths", options.get("query_lengths"), query.shape[:-2], query.shape[-2])
        return projected if exists is None else np.where(exists, projected, projected.dtype.type(0))

    def _projected(self, name: str, x: Array) -> Array:
        bias = self.weights.get(f"{name}.bias")
        y: Array = x @ self.weights[f"{name}.weight"].T
        return y if bias is None else y + bias

    def _heads(self, name: str, x: Array, heads: int) -> Array:
        y = self._projected(name, x)
        return np.swapaxes(y.reshape(*y.shape[:-1], heads, -1), -3, -2)

    def _normalised(self, name: str, x: Array) -> Array:
        weight = self.weights.get(f"{name}.weight")
        if weight is None:
            return x
        size = np.sqrt((x * x).mean(-1, keepdims=True) + x.dtype.type(NORM_EPSILON))
        normalised: Array = x / size * weight
        return normalised


def continued(q: Any, k: Any, v: Any, cache: KeyValueCache | None, rotary: float | None, xp: Any) -> tuple[Any, ...]:
    """Queries, keys and values of new tokens, rotated and appended to the cache; `xp` is NumPy or torch."""
    before = 0 if cache is None else cache.length
    if rotary is not None:
        q, k = (rotated(x, before, rotary, xp) for x in (q, k))
    if cache is not None:
        if before:
            k, v = xp.concatenate([cache.keys, k], -2), xp.concatenate([cache.values, v], -2)
        cache.keys, cache.values = k, v
    return q, k, v


def rotated(x: Any, start: int, base: float, xp: Any) -> Any:
    """Rotary positions: columns i and i + width/2 turned by (start + token) · base^(-2i/width), angles in double."""
    half = x.shape[-1] // 2
    double = {"dtype": xp.float64} | ({} if xp is np else {"device": x.device})
    angle = xp.outer(start + xp.arange(x.shape[-2], **double), base ** (-xp.arange(half, **double) / half))
    cos, sin = xp.asarray(xp.cos(angle), dtype=x.dtype), xp.asarray(xp.sin(angle), dtype=x.dtype)
    a, b = x[..., :half], x[..., half:]
    return xp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
