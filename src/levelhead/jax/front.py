"""`levelhead.jax.attention` and `observe`: the front for JAX arrays, traced or not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from levelhead.call.options import Options, Shape, documented, known, logit_cap
from levelhead.errors import bad_type
from levelhead.jax import sharded
from levelhead.jax.call import Arrays, Layout, Plan, described
from levelhead.jax.observation import Observation
from levelhead.jax.operators import attend
from levelhead.jax.promotion import usual_promotion
from levelhead.jax.varying import as_varying, axes_of
from levelhead.observation import Unpack


class _Listening(threading.local):
    measure: Callable[..., None] | None = None  # while a model is watched


listening = _Listening()


def report(q: Any, k: Any, options: Mapping[str, Any], layout: str) -> None:
    """Tells a watch of this call."""
    if listening.measure is not None:
        listening.measure("levelhead", q, k, dict(options), layout)


@documented()
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    layout: Layout = "BNTH",
    threads: int | None = None,
    keys_over: str | None = None,
    **options: Unpack[Options],
) -> Any:
    """Exact scaled dot-product attention on arrays of JAX: softmax(scale · q kᵀ, as the options say) v.

    It can be differentiated by q, k, v, an additive mask, sinks and the scale, where these are arrays, any number of
    times; second derivatives keep the whole matrix of logits. It goes through jit, grad, vmap, checkpoint, scan, export
    and shard_map. On the CPU the kernel computes it; elsewhere JAX's own operations, some keys at a time.

    Args:
        q: queries (..., H, T, D), or (T, D) for one head. float32, float64, float16, bfloat16.
        k: keys (..., G, S, D); query head h uses head h // (H / G).
        v: values (..., G, S, E).
        {options}
        layout: "BTNH" where tokens come before heads, (..., T, H, D), as in `jax.nn`; also of the result.
        threads: of the kernel, at most so many; the result has the same bits for any number.
        keys_over: inside `shard_map`, the axis of the mesh over which keys are spread: k, v, a mask and the ids of keys
            are this device's part, equal parts in order, and q is whole. Positions and lengths are those in the whole
            sequence. The result is the same on all devices of the axis.

    Returns:
        (..., H, T, E) in q's dtype, in its layout. A row that sees no key is 0.

    >>> q = jax.numpy.ones((2, 3, 4))
    >>> attention(q, q, q, causal=True).shape
    (2, 3, 4)
    """
    known("attention", options)
    if v is None:
        raise bad_type("v", "values", "None", "Without values there are statistics alone: levelhead.jax.observe")
    report(q, k, options, layout)
    plan, _, shape, found, _ = _attended(q, k, v, options, layout, threads, keys_over, observed=False)
    return _as_given(found["out"], bool(shape.lead), plan.tokens_first)


@documented()
def observe(
    q: Any,
    k: Any,
    v: Any = None,
    *,
    layout: Layout = "BNTH",
    threads: int | None = None,
    keys_over: str | None = None,
    **options: Unpack[Options],
) -> Observation:
    """Attention with every statistic of its softmax, in the same pass.

    Args:
        q, k, v: as in `attention`; without v, only the statistics are computed.
        {options}
        layout: as in `attention`; rows and heads of the statistics are (..., H, T) and (..., H) in both.
        threads: of the kernel, at most so many.
        keys_over: as in `attention`.

    Returns:
        An `Observation`, which jit, vmap and scan return like an array. Gradients reach its `output` and `logsumexp`.

    >>> q = jax.numpy.ones((2, 3, 4))
    >>> observe(q, q, causal=True).rows.count[0].tolist()
    [1, 2, 3]
    """
    known("observe", options)
    report(q, k, options, layout)
    attended = _attended(q, k, v, options, layout, threads, keys_over, observed=True)
    plan, arrays, shape, found, sinks = attended
    state = {name: x if shape.lead else x[0] for name, x in found.items() if name != "out"}
    return Observation(
        sums=state["sums"],
        counts=state["counts"],
        acc=None if v is None else state["acc"],
        values=None if v is None else _as_given(found["out"], bool(shape.lead), plan.tokens_first),
        per_row=state["logsumexp"],
        sinks=sinks,
        query_lengths=arrays.get("query_lengths"),
        segments=tuple(arrays[name] for name in ("query_segments", "key_segments") if name in arrays),
        keys=shape.S if keys_over is None else sharded.keys_in_all(keys_over, shape),
        dtype=str(arrays["q"].dtype),
        cap=logit_cap(options),
    )


@usual_promotion
def _attended(
    q: Any,
    k: Any,
    v: Any,
    options: Mapping[str, Any],
    layout: str,
    threads: int | None,
    keys_over: str | None,
    observed: bool,
) -> tuple[Plan, Arrays, Shape, Arrays, Any]:
    """The call as it was described, its results by name, and its sinks."""
    sinks = None
    if keys_over is not None:
        _, _, shape = described(q, k, v, {}, layout=layout)
        sharded.check_axis(keys_over, q, k)
        options, sinks = sharded.of_this_part(keys_over, options, shape, observed=observed)
    plan, arrays, shape = described(q, k, v, options, layout=layout, threads=threads, observed=observed)
    found = attend(plan, as_varying(arrays, axes_of(arrays)))
    if keys_over is None:
        sinks = plan.per_head("sinks", arrays, found["logsumexp"].dtype) if observed else None
        return plan, arrays, shape, found, sinks
    return plan, arrays, shape, sharded.joined(keys_over, plan, found, sinks, shape), sinks


def _as_given(out: Any, has_heads: bool, tokens_first: bool) -> Any:
    """Without the axis of heads that q did not have."""
    if has_heads:
        return out
    return out[:, 0] if tokens_first else out[0]
