"""What `levelhead.jax.observe` returns: a pytree of JAX arrays, the states of the rows.

Inside jit it reads its statistics off in JAX, in float32; outside, where its numbers are known, it is read, printed,
merged and judged as the `levelhead.Observation` that `observation` gives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from levelhead import observation, stats
from levelhead.call.arrays import Origin
from levelhead.call.segments import first_keys
from levelhead.errors import bad_value
from levelhead.jax.promotion import usual_promotion
from levelhead.state import State


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True, eq=False, repr=False)
class Observation:
    """The states of the rows of an attention call."""

    sums: Any  # (..., H, T, 8)
    counts: Any  # (..., H, T, 2)
    acc: Any  # (..., H, T, E); None: statistics only
    values: Any  # the output, in the layout of the call
    per_row: Any
    sinks: Any  # (H,)
    query_lengths: Any  # (B,)
    segments: tuple[Any, ...]  # of queries and keys, (B, T) and (B, S)
    keys: int = field(metadata={"static": True})
    dtype: str = field(metadata={"static": True})
    cap: float | None = field(metadata={"static": True})

    @property
    def output(self) -> Any:
        """The attention, with the bits of `attention`."""
        if self.values is None:
            given = "one made without v, which holds statistics only"
            raise bad_value("output", "an observation with values", given, "Call observe(q, k, v)")
        return self.values

    @property
    def logsumexp(self) -> Any:
        """(..., H, T) natural log of the softmax denominator, float32 (float64 for float64)."""
        return self.per_row

    @property
    @usual_promotion
    def rows(self) -> stats.Rows:
        """Every statistic per query row, (..., H, T): NumPy arrays in float64, inside jit JAX arrays in float32."""
        if not self._traced():
            return self.observation.rows
        return stats.rows(self.sums, self.counts, self.sinks, self._exists(jnp))

    @property
    @usual_promotion
    def heads(self) -> stats.Heads:
        """The rows summed up per head, (..., H), as `rows` are."""
        if not self._traced():
            return self.observation.heads
        exists: Any = self._exists(jnp)
        return stats.heads(self.rows, exists)

    @property
    def observation(self) -> observation.Observation[Any]:
        """The same on the host, for `levelhead.merge`, printing and whatever takes one."""
        if self._traced():
            advice = "Return this from the jitted function, and read it outside; rows and heads can be read inside"
            raise bad_value("observation", "arrays whose numbers are known", "traced arrays", advice)
        sums, acc = np.asarray(self.sums), None if self.acc is None else np.asarray(self.acc)
        first = None
        if self.segments:
            ids = first_keys(*(np.asarray(x, np.int64) for x in self.segments))
            first = ids.reshape((*sums.shape[:-3], 1, sums.shape[-2]) if sums.ndim > 2 else (sums.shape[-2],))
        state = State(sums, np.asarray(self.counts, np.int64), acc, self.keys, first)
        sinks = None if self.sinks is None else np.asarray(self.sinks, np.float64)
        origin = Origin("jax", self.dtype, np.dtype(jnp.dtype(self.dtype)), _Namespace)
        return observation.Observation(state, sinks, origin, self._exists(np), self.cap)

    def __repr__(self) -> str:
        if not isinstance(self.sums, jax.Array | np.ndarray):  # a tree of shapes, axes, shardings …
            return f"Observation(of {type(self.sums).__name__}, {self.keys} keys)"
        if self._traced():
            return f"Observation(traced, rows {self.sums.shape[:-1]}, {self.keys} keys)"
        return repr(self.observation)

    def _repr_html_(self) -> str:
        return self.observation._repr_html_()

    def _traced(self) -> bool:
        return isinstance(self.sums, jax.core.Tracer)

    def _exists(self, xp: Any) -> Any:
        if self.query_lengths is None:
            return None
        shape = self.sums.shape[:-1]
        exists = xp.arange(shape[-1]) < xp.asarray(self.query_lengths)[:, None]
        return exists.reshape((*shape[:-2], 1, shape[-1])) if len(shape) > 1 else exists[0]


for _kind in (stats.Rows, stats.Heads):  # what jit may return
    jax.tree_util.register_dataclass(_kind)


class _Namespace:
    """How a host array becomes JAX's: `Origin` asks for it so."""

    @staticmethod
    def from_dlpack(array: Any) -> Any:
        bits = array.dtype == np.uint16
        return jnp.asarray(array.view(jnp.bfloat16) if bits else array)
