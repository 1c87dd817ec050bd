"""Calls on JAX arrays that several test files share: options in a table, and the same call through NumPy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import levelhead as lh
from support import Array, qkv

B, H, G, T, S, D, E = 2, 4, 2, 9, 21, 8, 6
_rng = np.random.default_rng(7)

OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"causal": True},
    "window": {"window": (5, 2)},
    "one-sided window": {"window": (None, 3)},
    "bool mask": {"mask": _rng.random((T, S)) < 0.7},
    "bias": {"mask": _rng.standard_normal((B, H, T, S)).astype(np.float32)},
    "row bias": {"mask": _rng.standard_normal((T, 1)).astype(np.float32)},
    "head bias": {"mask": _rng.standard_normal((H, 1, S)).astype(np.float32)},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi": True},
    "sinks": {"sinks": _rng.standard_normal(H).astype(np.float32)},
    "key lengths": {"key_lengths": np.array([S - 4, 0])},
    "query lengths": {"query_lengths": np.array([T - 3, T])},
    "segments": {"segments": (np.arange(T) * 3 // T, np.sort(_rng.integers(0, 3, S)))},
    "dropout": {"dropout": 0.3, "seed": 5 + 2**40},
    "cosine": {"scale": "cosine"},
    "log-n": {"scale": "log-n", "causal": True},
    "scale": {"scale": 0.1},
    "scale per head": {"scale": _rng.random(H).astype(np.float32)},
    "query start": {"query_start": np.array([2, 7]), "causal": True},
    "many": {"causal": True, "alibi": True, "sinks": np.zeros(H, np.float32), "softcap": 2.0, "window": (9, None)},
}
LEARNED = ("scale", "mask", "sinks")  # options with gradients, where they are float arrays


def arrays(dtype: str = "float32") -> tuple[Array, Array, Array]:
    return qkv((B, H), T, S, D, E, groups=G, dtype=dtype)


def learned(options: dict[str, Any]) -> dict[str, Any]:
    """The options that a gradient reaches, as JAX arrays."""
    found = {name: options[name] for name in LEARNED if isinstance(options.get(name), np.ndarray | float)}
    return {name: jnp.asarray(x, jnp.float32) for name, x in found.items() if np.asarray(x).dtype != bool}


def loss_of(observed: Any, dout: Any, dlse: Any) -> Any:
    lse = jnp.where(jnp.isfinite(observed.logsumexp), observed.logsumexp, 0.0)
    return (observed.output.astype(jnp.float32) * dout).sum() + (lse * dlse).sum()


def numpy_gradients(
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    dlse: Array,
    options: dict[str, Any],
    names: tuple[str, ...],
    lse: Any = None,
) -> dict[str, Array]:
    """`lse`: as the kernel gave it; read off the state, it may be another rounding of the same number."""
    seen = lh.observe(q, k, v, **options)
    lse = seen.logsumexp if lse is None else np.asarray(lse)
    dlse = np.where(np.isfinite(lse), dlse, 0.0).astype(lse.dtype)
    found = lh.attention_backward(
        dout.astype(q.dtype), q, k, v, seen.output, lse, dlogsumexp=dlse, wrt=names, **options
    )
    return dict(zip(names, found, strict=True))


def compiled_text(function: Any, *inputs: Any) -> str:
    text: str = jax.jit(function).lower(*inputs).compile().as_text()
    return text
