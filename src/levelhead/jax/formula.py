"""Attention in JAX's own operations, over chunks of keys: for devices that the kernel does not serve.

The states of the rows and the gradients, by `lax.scan`: nothing holds more than T rows of a chunk. What is computed is
the formula of `reference` in float32 (float64 for float64); states are joined by its merge. `whole` keeps the whole
matrix of logits and can be differentiated any number of times: second derivatives come from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from levelhead import reference, state
from levelhead.call.options import Scoring
from levelhead.jax.call import Arrays, Plan, wide
from levelhead.jax.varying import as_varying, axes_of
from levelhead.state import State

CHUNK = 512  # keys; a chunk of logits of one head and 4096 rows is 8 MiB

_OF_KEYS = ("mask", "key_segments")  # options with an axis of keys, if it is not of size 1


class _Case(NamedTuple):
    """A call as the formula reads it: heads first, in the type that is computed in, finite."""

    q: Any  # (..., H, T, D)
    k: Any  # (..., G, S, D)
    v: Any
    wild_q: Any  # NaN where a query holds a NaN or inf, else 0: (..., H, T)
    wild_k: Any
    scoring: Scoring


def _case(plan: Plan, arrays: Arrays) -> _Case:
    real = wide(arrays["q"].dtype)
    q, k, v = (arrays[name].swapaxes(-2, -3) if plan.tokens_first else arrays[name] for name in "qkv")
    wild_q, wild_k = (jnp.where(jnp.isfinite(x).all(-1), 0.0, jnp.nan).astype(real) for x in (q, k))
    q, k = (jnp.where(jnp.isfinite(x), x, 0).astype(real) for x in (q, k))
    scoring = plan.scoring(arrays, real)
    mask = scoring.mask
    if mask is not None and mask.dtype != jnp.bool_:
        scoring = scoring._replace(mask=mask.astype(real))
    return _Case(q, k, v.astype(real), wild_q, wild_k, scoring)


def _unit(x: Any) -> Any:
    """Rows of norm 1; a zero row stays zero, with zero gradient."""
    zero = (x == 0).all(-1, keepdims=True)
    return jnp.where(zero, 0.0, x / jnp.linalg.norm(jnp.where(zero, 1.0, x), axis=-1, keepdims=True))


def _by_group(x: Any, heads: int) -> Any:
    """Keys or values as the query heads see them."""
    return jnp.repeat(x, heads // max(x.shape[-3], 1), axis=-3)


def _logits(case: _Case, j: Any, log_n: Any = None) -> Any:
    """Of the keys in `case`, at positions j: (..., H, T, keys)."""
    q, k = (_unit(x) if case.scoring.cosine else x for x in (case.q, case.k))
    H = q.shape[-3]
    wild = case.wild_q[..., :, None] + _by_group(case.wild_k[..., None], H).swapaxes(-1, -2)
    products = q @ _by_group(k, H).swapaxes(-1, -2)
    if log_n is not None:
        products = products * log_n
    scoring = case.scoring._replace(log_n=case.scoring.log_n and log_n is None)
    s = reference.score(scoring, products, jnp.arange(q.shape[-2]), j)
    return jnp.where(s == -jnp.inf, s, s + wild)  # after the score: there a hidden NaN would spoil derivatives


def _of_keys(case: _Case, low: Any, size: int) -> tuple[_Case, Any]:
    """The call with some of its keys, and their positions."""

    def part(x: Any, axis: int) -> Any:
        return lax.dynamic_slice_in_dim(x, low, size, axis)

    held = {name: x for name in _OF_KEYS if (x := getattr(case.scoring, name)) is not None and x.shape[-1] > 1}
    scoring = case.scoring._replace(**{name: part(x, x.ndim - 1) for name, x in held.items()})
    k, v, wild = part(case.k, case.k.ndim - 2), part(case.v, case.v.ndim - 2), part(case.wild_k, case.wild_k.ndim - 1)
    return case._replace(k=k, v=v, wild_k=wild, scoring=scoring), low + jnp.arange(size)


def _over_chunks(
    step: Callable[[Any, Any, int], tuple[Any, Any]], carry: Any, keys: int, axes: frozenset[str]
) -> tuple[Any, Any, Any]:
    """Runs `step(carry, low, size)` over the keys: the carry, what the full chunks gave, stacked, and the rest's."""
    full, rest = divmod(keys, CHUNK)
    carry = as_varying(carry, axes)
    stacked, last = None, None
    if full:
        carry, stacked = lax.scan(lambda c, low: step(c, low, CHUNK), carry, jnp.arange(full) * CHUNK)
    if rest or not full:
        carry, last = step(carry, full * CHUNK, rest)
    return carry, stacked, last


def _log_n(case: _Case) -> Any:
    """ln of how many keys position and segment leave to each row, which no chunk knows alone; None: not asked for."""
    if not case.scoring.log_n:
        return None
    index, lead = jnp.arange(case.q.shape[-2]), case.q.shape[:-3]

    def step(n: Any, low: Any, size: int) -> tuple[Any, None]:
        part, j = _of_keys(case, low, size)
        return n + part.scoring.visible(index, j).sum(-1), None

    none = jnp.zeros((math.prod(lead), len(index)), index.dtype)
    n, _, _ = _over_chunks(step, none, case.k.shape[-2], axes_of(case))
    return jnp.log(jnp.maximum(n, 1).astype(case.q.dtype)).reshape(*lead, 1, -1, 1)


def first_keys(case: _Case) -> Any:
    """The first key of each query's segment (..., 1, T, 1); without segments key 0."""
    ids = case.scoring.query_segments
    if ids is None:
        return 0
    none = case.k.shape[-2]

    def step(first: Any, low: Any, size: int) -> tuple[Any, None]:
        part, j = _of_keys(case, low, size)
        mine = ids[:, :, None] == part.scoring.key_segments[:, None, :]
        return jnp.minimum(first, jnp.where(mine, j, none).min(-1, initial=none)), None

    first, _, _ = _over_chunks(step, jnp.full(ids.shape, none), none, axes_of(case))
    return jnp.where(first == none, -1, first).reshape(*case.q.shape[:-3], 1, -1, 1)


def states(plan: Plan, arrays: Arrays) -> State:
    """The states of all rows, heads first."""
    case = _case(plan, arrays)
    log_n, first, H = _log_n(case), first_keys(case), case.q.shape[-3]
    nothing = state.identity(case.q.shape[:-1], case.v.shape[-1], np.dtype(case.q.dtype))
    count_type = jnp.arange(1).dtype

    def step(so_far: tuple[Any, Any, Any], low: Any, size: int) -> tuple[tuple[Any, Any, Any], None]:
        if size == 0:
            return so_far, None
        part, j = _of_keys(case, low, size)
        s = _logits(part, j, log_n)
        sums, counts, weights = reference.sums_of(s, j, first)
        here = State(sums, counts.astype(count_type), _weighed(weights, _by_group(part.v, H), s != -jnp.inf), 0)
        sums_before, counts_before, acc_before = so_far
        x = reference.merge(State(sums_before, counts_before, acc_before, 0), here, 0)
        return (x.sums.astype(sums.dtype), x.counts.astype(count_type), x.acc), None

    start = jnp.asarray(nothing.sums), jnp.asarray(nothing.counts, count_type), jnp.asarray(nothing.acc)
    (sums, counts, acc), _, _ = _over_chunks(step, start, case.k.shape[-2], axes_of(case))
    return State(sums, counts, acc, case.k.shape[-2])


def _weighed(weights: Any, v: Any, seen: Any) -> Any:
    """Σ of values over the keys that a row sees; a NaN or inf that it sees makes it NaN, a hidden one nothing."""
    wild = ~jnp.isfinite(v)
    spoiled = seen.astype(v.dtype) @ wild.astype(v.dtype)
    return (weights @ jnp.where(wild, 0.0, v)) * jnp.where(spoiled > 0, jnp.nan, 1.0)  # so are its derivatives


def gradients(
    plan: Plan, wanted: tuple[str, ...], arrays: Arrays, out: Any, logsumexp: Any, dout: Any, dlogsumexp: Any
) -> Arrays:
    """The gradients of output and logsumexp by the arrays in `wanted`, from the weights of one chunk at a time."""
    case = _case(plan, arrays)
    log_n, H, real = _log_n(case), case.q.shape[-3], case.q.dtype
    dout, out = (x.swapaxes(-2, -3) if plan.tokens_first else x for x in (dout, out))
    dout, lse = dout.astype(real), jnp.where(logsumexp == -jnp.inf, 0.0, logsumexp)[..., None]
    delta = (dout * out.astype(real)).sum(-1, keepdims=True) - dlogsumexp.astype(real)[..., None]
    moved: Arrays = {name: getattr(case, name) for name in ("q", "k")}
    moved |= {name: getattr(case.scoring, name) for name in ("scale", "mask") if name in wanted}
    per_key = {"k"} | {name for name in ("mask",) if name in wanted and moved["mask"].shape[-1] > 1}

    def step(so_far: Arrays, low: Any, size: int) -> tuple[Arrays, Arrays]:
        part, j = _of_keys(case, low, size)
        here = moved | {"k": part.k} | ({"mask": part.scoring.mask} if "mask" in moved else {})

        def logits(x: Arrays) -> Any:
            options = {name: x[name] for name in ("scale", "mask") if name in x}
            return _logits(part._replace(q=x["q"], k=x["k"], scoring=part.scoring._replace(**options)), j, log_n)

        s, pull = jax.vjp(logits, here)
        seen = s != -jnp.inf
        p = jnp.where(seen, jnp.exp(s - lse), 0.0)
        v = jnp.where(jnp.isfinite(part.v), part.v, 0.0)
        ds = jnp.where(seen, p * (dout @ _by_group(v, H).swapaxes(-1, -2) - delta), 0.0)
        found = pull(ds)[0]
        by_head = p.swapaxes(-1, -2) @ dout
        dv = by_head.reshape(*v.shape[:-2], H // max(v.shape[-3], 1), *v.shape[-2:]).sum(-3)
        summed = {name: so_far[name] + x for name, x in found.items() if name not in per_key}
        return summed, {name: found[name] for name in per_key} | {"v": dv}

    start = {name: jnp.zeros_like(x) for name, x in moved.items() if name not in per_key}
    result, stacked, last = _over_chunks(step, start, case.k.shape[-2], axes_of(case))
    for name in (*per_key, "v"):
        axis = -1 if name == "mask" else -2
        parts = [] if stacked is None else [_side_by_side(stacked[name], axis)]
        result[name] = jnp.concatenate(parts + ([] if last is None else [last[name]]), axis)
    if "sinks" in wanted:
        sink = case.scoring.sinks[:, None, None]
        by_row = jnp.where(logsumexp[..., None] == -jnp.inf, 0.0, jnp.exp(sink - lse)) * delta
        result["sinks"] = -jnp.moveaxis(by_row, -3, 0).reshape(H, -1).sum(-1)
    if plan.tokens_first:
        result |= {name: result[name].swapaxes(-2, -3) for name in "qkv"}
    return {name: result[name].astype(arrays[name].dtype) for name in wanted}


def _side_by_side(x: Any, axis: int) -> Any:
    """(chunks, ...) with the chunks one after another along an axis."""
    axis += x.ndim
    moved = jnp.moveaxis(x, 0, axis - 1)
    return moved.reshape(*moved.shape[: axis - 1], x.shape[0] * x.shape[axis], *moved.shape[axis + 1 :])


def whole(plan: Plan, arrays: Arrays) -> tuple[Any, Any]:
    """Output and logsumexp from the whole matrix of logits."""
    case = _case(plan, arrays)
    H, sinks = case.q.shape[-3], case.scoring.sinks
    s = _logits(case, jnp.arange(case.k.shape[-2]))
    if sinks is not None:
        s = jnp.concatenate([s, jnp.broadcast_to(sinks[:, None, None], (*s.shape[:-1], 1))], -1)
    none = (s == -jnp.inf).all(-1, keepdims=True)
    m = lax.stop_gradient(jnp.where(none, 0.0, s.max(-1, keepdims=True, initial=-jnp.inf)))
    e = jnp.where(s == -jnp.inf, 0.0, jnp.exp(jnp.where(none, 0.0, s - m)))
    total = jnp.where(none, 1.0, e.sum(-1, keepdims=True))
    logsumexp = jnp.where(none, -jnp.inf, jnp.log(total) + m)[..., 0]
    keys = case.k.shape[-2]
    out = _weighed((e / total)[..., :keys], _by_group(case.v, H), s[..., :keys] != -jnp.inf)
    out = out.swapaxes(-2, -3) if plan.tokens_first else out
    return out.astype(arrays["q"].dtype), logsumexp
