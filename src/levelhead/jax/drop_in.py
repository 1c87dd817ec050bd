"""`jax.nn.dot_product_attention`, with its signature and its meaning, computed by levelhead.

What JAX does differently from `levelhead.jax.attention` is done here as JAX does it: positions count from the first
query and key, a row that sees no key is the mean of all values (and 0 beyond `query_seq_lengths`), the residual is not
differentiated.
"""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import lax

from levelhead.call.shapes import broadcasting
from levelhead.errors import bad_value
from levelhead.jax.call import described
from levelhead.jax.front import report
from levelhead.jax.operators import attend
from levelhead.jax.promotion import usual_promotion
from levelhead.jax.varying import as_varying, axes_of

# The residual of a row that sees no key: JAX's stand-in for -inf.
_NOTHING_SEEN = -0.7 * float(np.finfo(np.float32).max)


@usual_promotion
def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla"] | None = None,
    return_residual: bool = False,
) -> Any:
    """As `jax.nn.dot_product_attention`: query (B, T, N, H), key and value (B, S, K, H), or without B.

    `implementation` may be None or "xla"; both are levelhead. A bias and a mask together are joined into one array.

    >>> q = jax.numpy.ones((2, 5, 4, 8))
    >>> dot_product_attention(q, q, q, is_causal=True).shape
    (2, 5, 4, 8)
    """
    if implementation not in (None, "xla"):
        advice = "Call jax.nn.dot_product_attention for another implementation"
        raise bad_value("implementation", 'None or "xla"', repr(implementation), advice)
    given = np.shape(query)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if np.ndim(x) not in (3, 4):
            raise bad_value(name, "3 or 4 dimensions", f"shape {np.shape(x)}", "Reshape it")
    query, key, value, bias, mask = map(with_batch, (query, key, value, bias, mask))
    lengths = {"query_seq_lengths": query_seq_lengths, "key_value_seq_lengths": key_value_seq_lengths}
    _check(query, key, value, bias, mask, lengths)
    options = as_options(
        query, key, bias, mask, scale, is_causal, query_seq_lengths, key_value_seq_lengths, local_window_size
    )
    report(query, key, options, "BTNH")
    plan, arrays, _ = described(query, key, value, options, layout="BTNH")
    found = attend(plan, as_varying(arrays, axes_of(arrays)))
    logsumexp = found["logsumexp"].swapaxes(1, 2)
    out = found["out"]
    some = key.shape[1] > 0  # without any key there is nothing to be the mean of: zeros, and -inf
    if some and any(x is not None for x in (mask, local_window_size, key_value_seq_lengths)):
        out = _where_nothing_is_seen(out, value, logsumexp, query_seq_lengths)
    if not return_residual:
        return out.reshape(given)
    residual = jnp.where((logsumexp == -jnp.inf) & some, _NOTHING_SEEN, logsumexp).astype(key.dtype)
    return out.reshape(given), lax.stop_gradient(residual).reshape(given[:-1])


def as_options(
    query: Any,
    key: Any,
    bias: Any = None,
    mask: Any = None,
    scale: Any = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
) -> dict[str, Any]:
    """JAX's arguments as the options of `levelhead.jax.attention` in the layout BTNH."""
    window = local_window_size
    return {
        "scale": scale,
        "causal": bool(is_causal),
        "window": (window, window) if isinstance(window, int) else window,
        "mask": _joined(query, bias, mask),
        "query_start": 0,
        "query_lengths": _within(query_seq_lengths, query.shape[1]),
        "key_lengths": _within(key_value_seq_lengths, key.shape[1]),
    }


def with_batch(x: Any) -> Any:
    if x is None:
        return None
    x = jnp.asarray(x)
    return x.reshape((*(1,) * (4 - x.ndim), *x.shape))


def _check(query: Any, key: Any, value: Any, bias: Any, mask: Any, lengths: dict[str, Any]) -> None:
    """What JAX refuses with a ValueError."""

    def sides(x: Any) -> str:
        return f"{x.dtype} of shape {x.shape}"

    B, S, K, H = key.shape
    if value.shape != key.shape or value.dtype != key.dtype:
        raise bad_value("value", f"{sides(key)}, as key", sides(value), "Convert or reshape it")
    if query.shape[0] != B or query.shape[3] != H or query.dtype != key.dtype:
        raise bad_value(
            "query", f"{key.dtype} of shape ({B}, T, N, {H})", sides(query), "Heads are the third axis of four"
        )
    if query.shape[2] % max(K, 1):
        raise bad_value("query", f"a multiple of the {K} heads of key", f"{query.shape[2]}", "Heads are the third axis")
    if mask is not None and mask.dtype != jnp.bool_:
        raise bad_value("mask", "bool (True: takes part)", mask.dtype, "An additive mask is the argument bias")
    for name, x in (("mask", mask), ("bias", bias)):
        if x is not None and x.ndim != 4:
            raise bad_value(name, "4 dimensions, that broadcast to (B, N, T, S)", f"shape {x.shape}", "Reshape it")
        if x is not None:
            broadcasting(name, x.shape, (B, query.shape[2], query.shape[1], S))
    for name, x in lengths.items():
        if x is not None and (np.shape(x) != (B,) or jnp.asarray(x).dtype != jnp.int32):
            raise bad_value(
                name, f"int32 of shape ({B},)", f"{jnp.asarray(x).dtype} of shape {np.shape(x)}", "Convert it"
            )


def _joined(query: Any, bias: Any, mask: Any) -> Any:
    if bias is None:
        return mask
    bias = bias if bias.dtype in (query.dtype, jnp.float32) else bias.astype(jnp.float32)
    return bias if mask is None else jnp.where(mask, bias, -jnp.inf)


def _within(lengths: Any, most: int) -> Any:
    return None if lengths is None else jnp.clip(jnp.asarray(lengths), 0, most)


def _where_nothing_is_seen(out: Any, value: Any, logsumexp: Any, query_seq_lengths: Any) -> Any:
    """A row that sees no key is the mean of all values, unless the query does not exist."""
    mean = jnp.repeat(value.mean(1, keepdims=True), out.shape[2] // max(value.shape[2], 1), 2)
    nothing = logsumexp == -jnp.inf
    if query_seq_lengths is not None:
        nothing = nothing & (jnp.arange(out.shape[1])[:, None] < query_seq_lengths[:, None, None])
    return jnp.where(nothing[..., None], mean, out)
