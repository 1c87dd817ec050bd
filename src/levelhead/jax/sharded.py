"""Attention whose keys are spread over the devices of a mesh axis, inside `shard_map`.

Every device has all queries of its rows and a part of their keys, one part after another along the axis. It attends to
its own part; the results are joined by the law that joins states, written as sums and maxima over the axis. Only what
is joined travels, never a key. Shards of heads or batch rows need nothing of this: they are calls of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from levelhead import state
from levelhead.call.options import Shape
from levelhead.errors import bad_value
from levelhead.jax.call import Arrays, Plan
from levelhead.jax.varying import axes_of

_PLACED = ("causal", "window", "alibi")  # what depends on where the queries are


def keys_in_all(axis: str, shape: Shape) -> int:
    """How many keys the devices have together."""
    return int(lax.axis_size(axis)) * shape.S


def check_axis(axis: Any, q: Any, k: Any) -> None:
    """That there is such an axis, and that queries and keys are spread as they must be, where JAX keeps count of it."""
    wanted = "an axis of the mesh, inside jax.shard_map"
    try:
        counted = axes_of(lax.axis_index(axis))
    except (NameError, TypeError) as error:
        raise bad_value("keys_over", wanted, repr(axis), "Name the axis that k and v are spread over") from error
    if not counted:
        return  # shard_map(check_vma=False), or the axis of a vmap
    if counted <= axes_of(q):
        advice = 'Leave the axis out of its in_specs, or jax.lax.all_gather(q, axis, to="invarying")'
        raise bad_value(
            "q", f"whole queries with keys_over, the same along {axis!r}", "one that varies along it", advice
        )
    if not counted <= axes_of(k):
        advice = f"Spread k and v over {axis!r} in in_specs, or leave keys_over out"
        raise bad_value("k", f"a part of the keys, spread over {axis!r}", "one that is the same along it", advice)


def of_this_part(axis: str, given: Mapping[str, Any], shape: Shape, *, observed: bool) -> tuple[dict[str, Any], Any]:
    """The options of a call with this device's part of the keys, and the sinks, which join after the parts."""
    _refuse(given, observed)
    options, before = dict(given), lax.axis_index(axis) * shape.S
    if any(x is not None and x is not False for x in map(options.get, _PLACED)):
        start = options.get("query_start")
        options["query_start"] = (keys_in_all(axis, shape) - shape.T if start is None else jnp.asarray(start)) - before
    if options.get("key_lengths") is not None:
        options["key_lengths"] = jnp.clip(jnp.asarray(options["key_lengths"]) - before, 0, shape.S)
    sinks = options.pop("sinks", None)
    return options, None if sinks is None else jnp.asarray(sinks)


def _refuse(given: Mapping[str, Any], observed: bool) -> None:
    """What a part of the keys does not know."""
    advice = "Gather the keys, or leave it out"
    rule = getattr(given.get("scale"), "name", given.get("scale"))
    if isinstance(rule, str) and rule == "log-n":
        raise bad_value("scale", "no rule that counts all keys with keys_over", "log-n", advice)
    if given.get("dropout"):
        raise bad_value("dropout", "0 with keys_over", given["dropout"], advice)
    if observed and given.get("segments") is not None:
        raise bad_value("segments", "none in observe with keys_over, whose statistics have a first key", "some", advice)


def joined(axis: str, plan: Plan, found: Arrays, sinks: Any, shape: Shape) -> Arrays:
    """The results of all parts as one, the same on all devices of the axis."""
    logsumexp, out = found["logsumexp"], found["out"]
    top = lax.pmax(lax.stop_gradient(logsumexp), axis)
    if sinks is not None:
        top = jnp.maximum(top, lax.stop_gradient(sinks)[:, None])
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weight = jnp.where(logsumexp == -jnp.inf, 0.0, jnp.exp(logsumexp - top))
    total = lax.psum(weight, axis) + (0.0 if sinks is None else jnp.exp(sinks[:, None] - top))
    share = jnp.where(total == 0, 0.0, weight / jnp.where(total == 0, 1.0, total))[..., None]
    share = share.swapaxes(-2, -3) if plan.tokens_first else share
    result = {"out": lax.psum(jnp.where(share == 0, 0.0, share * out), axis).astype(out.dtype)}
    result["logsumexp"] = jnp.where(total == 0, -jnp.inf, jnp.log(jnp.where(total == 0, 1.0, total)) + top)
    return result | (_states(axis, found, shape) if plan.observed else {})


def _states(axis: str, found: Arrays, shape: Shape) -> Arrays:
    """`reference.merge` of all parts at once."""
    sums, counts, acc = (lax.stop_gradient(found[name]) for name in ("sums", "counts", "acc"))
    m_here, l, h, e2, mean_here, m2, low, first = jnp.moveaxis(sums, -1, 0)  # noqa: E741
    n_here, at = counts[..., state.COUNT], counts[..., state.ARGMAX]
    m, n = lax.pmax(m_here, axis), lax.psum(n_here, axis)
    w = jnp.where(n_here == 0, 0.0, jnp.exp2(m_here - m))
    moved = jnp.where(w == 0, 0.0, w * (h + (m_here - m) * l))
    mean = lax.psum(jnp.where(n_here == 0, 0.0, n_here * mean_here), axis) / jnp.maximum(n, 1)
    spread = jnp.where(n_here == 0, 0.0, m2 + n_here * (mean_here - mean) ** 2)
    part = lax.axis_index(axis)
    none = np.iinfo(np.int32).max
    argmax = lax.pmin(jnp.where((m_here == m) & (at >= 0), at + part * shape.S, none), axis)
    l_all, h_all, e2_all, m2_all = lax.psum((w * l, moved, w**2 * e2, spread), axis)
    wrong = jnp.isnan(l_all)
    columns = [m, l_all, h_all, e2_all, mean, m2_all, lax.pmin(low, axis)]
    columns = [jnp.where(wrong, jnp.nan, x) for x in columns]
    columns.append(lax.pmax(jnp.where(part == 0, first, -jnp.inf), axis))
    counted = jnp.stack([n, jnp.where(wrong | (argmax == none), -1, argmax)], -1)
    return {
        "sums": jnp.stack(columns, -1),
        "counts": counted.astype(counts.dtype),
        "acc": lax.psum(jnp.where(w[..., None] == 0, 0.0, w[..., None] * acc), axis),
    }
