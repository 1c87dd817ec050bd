"""The definition of truth: exact attention, its statistics, merge and gradients, in float64 NumPy.

Every other path of levelhead is tested against this one. It stores the whole matrix of logits and
is written to be read, not to be fast. Options are those of `levelhead.attention`; arrays are NumPy
(bfloat16 as ml_dtypes, or as its bits in uint16). `query_runs` and `key_runs`, lists of (start,
length, stride), say where queries (from query_start) and keys sit in a longer sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from levelhead import state, stats
from levelhead.call.dropout import dropout_keep as dropout_keep
from levelhead.call.halves import as_float32
from levelhead.call.options import Scoring, Shape, describe, namespace, shape_of
from levelhead.call.segments import positions
from levelhead.state import State as State

Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Observed:
    output: Array | None  # (..., H, T, E); None: no values
    logsumexp: Array  # (..., H, T)
    rows: stats.Rows
    state: State


def attention(q: Array, k: Array, v: Array, **options: Any) -> Array:
    """softmax(logits) v, shape (..., H, T, E)."""
    output = observe(q, k, v, **options).output
    assert output is not None
    return output


def observe(q: Array, k: Array, v: Array | None = None, **options: Any) -> Observed:
    """Attention with every statistic of its softmax."""
    shape, scoring, index, j = _setup(q, k, v, options)
    with np.errstate(all="ignore"):
        s = _logits(q, k, shape, scoring, index, j)
        first = _first_keys(scoring, j)
        sums, counts, e = sums_of(s, j, 0 if first is None else first.reshape((*shape.batch, 1, shape.T, 1)))
        acc = None
        if v is not None:
            if scoring.dropout > 0:
                keep = dropout_keep(scoring.seed, scoring.dropout, shape.H, scoring.positions(index), j)
                e = np.where(keep.reshape(e.shape), e / (1.0 - scoring.dropout), 0.0)
            acc = weigh(e, spread_heads(v, shape), s != -np.inf)
            acc = acc.reshape(*shape.lead, shape.T, v.shape[-1])
        sums = sums.reshape(*shape.lead, shape.T, len(state.SUMS))
        counts = counts.reshape(*shape.lead, shape.T, len(state.COUNTS))
        first = None if first is None else first.reshape((*shape.batch, 1, shape.T) if shape.lead else shape.T)
        found = State(sums, counts, acc, shape.S, first)
        return finish(found, scoring.sinks, scoring.existing_rows(shape, index))


def finish(x: State, sinks: Array | None = None, exists: Array | None = None) -> Observed:
    """Read the results off a state. Sinks join only here, so a merge cannot count them twice."""
    rows = stats.rows(x.sums, x.counts, sinks, exists)
    with np.errstate(all="ignore"):  # acc / Σ exp(s - m) is acc times the largest weight
        output = None if x.acc is None else x.acc * rows.top1[..., None]
    return Observed(output, rows.logsumexp, rows, x)


def merge(a: State, b: State, shift: int | None = None) -> State:
    """The state of a's keys followed by b's, which begin `shift` (a.keys) positions later. For NumPy and JAX."""
    shift, xp = a.keys if shift is None else shift, namespace(a.sums)
    with np.errstate(all="ignore"):
        ma, la, ha, e2a, mean_a, m2a, min_a, _ = xp.moveaxis(a.sums, -1, 0)
        mb, lb, hb, e2b, mean_b, m2b, min_b, _ = xp.moveaxis(b.sums, -1, 0)
        na, nb = a.counts[..., state.COUNT], b.counts[..., state.COUNT]
        m = xp.maximum(ma, mb)
        wa = xp.where(na == 0, 0.0, xp.exp2(ma - m))
        wb = xp.where(nb == 0, 0.0, xp.exp2(mb - m))
        h = xp.where(wa == 0, 0.0, wa * (ha + (ma - m) * la))
        h = h + xp.where(wb == 0, 0.0, wb * (hb + (mb - m) * lb))
        part, gap = nb / xp.maximum(na + nb, 1), mean_b - mean_a  # Chan, Golub, LeVeque 1979
        mean = xp.where(na == 0, mean_b, mean_a + gap * part)
        m2 = m2a + m2b + xp.where((na == 0) | (nb == 0), 0.0, gap**2 * na * part)
        first, first_keys = state.first_of(a, b, shift, xp)
        e2, low = wa**2 * e2a + wb**2 * e2b, xp.minimum(min_a, min_b)
        sums = xp.stack([m, wa * la + wb * lb, h, e2, mean, m2, low, first], axis=-1)
        earlier, later = a.counts[..., state.ARGMAX], b.counts[..., state.ARGMAX] + shift
        argmax = xp.where(xp.isnan(m), -1, xp.where(mb > ma, later, earlier))
        acc = None
        if a.acc is not None and b.acc is not None:
            parts = ((wa[..., None], a.acc), (wb[..., None], b.acc))  # a weight of 0 wins over an infinite value
            acc = sum(xp.where(w == 0, 0.0, w * x) for w, x in parts)
    return State(sums, xp.stack([na + nb, argmax], axis=-1), acc, a.keys + b.keys, first_keys)


def logits(q: Array, k: Array, **options: Any) -> Array:
    """The scored logits, shape (..., H, T, S); -inf where a key is hidden."""
    shape, scoring, index, j = _setup(q, k, None, options)
    with np.errstate(all="ignore"):
        s = _logits(q, k, shape, scoring, index, j)
    return s.reshape(*shape.lead, shape.T, shape.S)


def logits_of(q: Array, k: Array, shape: Shape, scoring: Scoring, index: Array) -> Array:
    """The same of a call that is described already, batch + (H, T, S); `index`: the places of its queries."""
    return _logits(q, k, shape, scoring, index, np.arange(shape.S))


def attention_backward(
    dout: Array, q: Array, k: Array, v: Array, dlogsumexp: Array | None = None, **options: Any
) -> dict[str, Array]:
    """Gradients by name: q, k, v, a float mask, sinks (H,) and the scale's factors (H,)."""
    mask = options.get("mask")
    shape, scoring, index, j = _setup(q, k, v, options)
    heads = (*shape.batch, shape.H, shape.T)
    exists = np.broadcast_to(True if (x := scoring.existing_rows(shape, index)) is None else x, heads)[..., None]
    with np.errstate(all="ignore"):
        s = _logits(q, k, shape, scoring, index, j)
        seen = s != -np.inf
        sinks = np.full(shape.H, -np.inf) if scoring.sinks is None else scoring.sinks
        sink = np.where(exists, sinks[:, None, None], -np.inf)
        m = np.maximum(s.max(-1, keepdims=True, initial=-np.inf), sink)
        e, e_sink = (np.where(seen, np.exp(s - m), 0.0), np.where(sink == -np.inf, 0.0, np.exp(sink - m)))
        total = e.sum(-1, keepdims=True) + e_sink
        total = np.where(total == 0, 1.0, total)
        w, w_sink = np.where(seen, e / total, 0.0), e_sink / total  # also where the total is NaN
        kept: Array | float = 1.0
        if scoring.dropout > 0:
            keep = dropout_keep(scoring.seed, scoring.dropout, shape.H, scoring.positions(index), j).reshape(w.shape)
            kept = keep / (1.0 - scoring.dropout)
        dout = np.where(exists, wide(dout).reshape(*heads, v.shape[-1]), 0.0)
        dw = slope_of_weights(dout, v, shape, seen, kept)
        dlse = 0.0 if dlogsumexp is None else np.where(exists, np.reshape(dlogsumexp, (*heads, 1)), 0.0)
        delta = (w * dw).sum(-1, keepdims=True) - dlse
        ds = np.where(seen, w * (dw - delta), 0.0)
        found = {"v": weigh(np.swapaxes(kept * w, -1, -2), dout, np.swapaxes(seen, -1, -2))}
        found["sinks"] = -(w_sink * delta)
        if mask is not None:
            found["mask"] = _unbroadcast(ds, np.shape(mask))
        found |= through_logits(ds, q, k, shape, scoring, index, j)
    for name in ("k", "v"):
        found[name] = sum_of_group(found[name], shape).reshape({"k": k, "v": v}[name].shape)
    found["q"] = found["q"].reshape(q.shape)
    for name in ("sinks", "scale"):
        found[name] = sum_of_heads(found[name])
    return found


def slope_of_weights(dout: Array, v: Array, shape: Shape, seen: Array, kept: Array | float) -> Array:
    """The gradient by each weight, batch + (H, T, S), from that by the output, batch + (H, T, E)."""
    return np.where(seen, kept * (dout @ np.swapaxes(spread_heads(v, shape), -1, -2)), 0.0)


def through_logits(
    ds: Array, q: Array, k: Array, shape: Shape, scoring: Scoring, index: Array, j: Array
) -> dict[str, Array]:
    """From the gradient by each logit, batch + (H, T, S), to those by q, k and the scale, per query head; the last is
    not summed up. A hidden pair takes no part, whatever numbers it has."""
    seen = ds != 0
    slope, n = _slope_of_softcap(q, k, shape, scoring, index, j)
    ds = np.where(seen, ds * slope, 0.0)
    wide_q, wide_k = wide(q).reshape(*shape.batch, shape.H, shape.T, shape.D), spread_heads(k, shape)
    wide_q, wide_k = (np.where(seen.any(axis)[..., None], x, 0.0) for axis, x in ((-1, wide_q), (-2, wide_k)))
    unit_q, unit_k = (_unit(x) if scoring.cosine else x for x in (wide_q, wide_k))
    pulled = weigh(ds * n, unit_k, seen)
    found = {"scale": unit_q * pulled}  # Σ_j ds_ij n_i (q_i·k_j)
    found["q"] = pulled * scoring.scale[:, None, None]
    ds = ds * n * scoring.scale[:, None, None]
    found["k"] = weigh(np.swapaxes(ds, -1, -2), unit_q, np.swapaxes(seen, -1, -2))
    if scoring.cosine:
        found["q"] = _through_unit(wide_q, found["q"])
        found["k"] = _through_unit(wide_k, found["k"])
    return found


def sum_of_group(x: Array, shape: Shape) -> Array:
    """Gradients of keys or values per query head, batch + (H, S, d), summed over the heads that share them."""
    each = shape.H // max(shape.G, 1)
    summed: Array = x.reshape(*shape.batch, shape.G, each, *x.shape[-2:]).sum(-3)
    return summed


def sum_of_heads(x: Array) -> Array:
    """Sums over all but the heads, (H,), of numbers batch + (H, T, ...)."""
    summed: Array = np.moveaxis(x, -3, 0).reshape(x.shape[-3], -1).sum(-1)
    return summed


def _slope_of_softcap(
    q: Array, k: Array, shape: Shape, scoring: Scoring, index: Array, j: Array
) -> tuple[Array | float, Array | float]:
    """d(capped) / d(scaled) of every logit, and ln(n_i) of every row; 1 where there is no such."""
    n: Array | float = 1.0
    if scoring.log_n:
        left = scoring.visible(index, j).sum(-1)  # (1, T) where all batch rows start at 0
        n = np.log(np.maximum(np.broadcast_to(left, (shape.B, shape.T)).reshape(*shape.batch, 1, shape.T, 1), 1))
    if scoring.softcap is None:
        return 1.0, n
    capped = _logits(q, k, shape, scoring._replace(alibi=None, mask=None), index, j)
    return np.where(capped == -np.inf, 0.0, 1.0 - (capped / scoring.softcap) ** 2), n


def _through_unit(x: Array, gradient: Array) -> Array:
    """The gradient by x of what was computed from x / |x|; 0 for the zero row."""
    unit = _unit(x)
    across: Array = gradient - unit * (unit * gradient).sum(-1, keepdims=True)
    norm: Array = np.linalg.norm(x, axis=-1, keepdims=True)
    return np.where(norm == 0, 0.0, across / np.where(norm == 0, 1.0, norm))


def _unbroadcast(x: Array, shape: tuple[int, ...]) -> Array:
    """x summed over the axes along which `shape` was broadcast to x's."""
    x = x.sum(tuple(range(x.ndim - len(shape)))) if x.ndim > len(shape) else x
    stretched = tuple(i for i, n in enumerate(shape) if n == 1 and x.shape[i] != 1)
    summed: Array = x.sum(stretched, keepdims=True)
    return summed.reshape(shape)


def _setup(q: Array, k: Array, v: Array | None, options: dict[str, Any]) -> tuple[Shape, Scoring, Array, Array]:
    """Sizes, checked options, indices (T,) in the sequence of queries and key positions j (S,)."""
    shape = shape_of(q.shape, k.shape, None if v is None else v.shape)
    sizes = (("query_runs", shape.T), ("key_runs", shape.S))
    index, j = (positions(options.pop(runs, None) or [(0, n, 1)]) for runs, n in sizes)
    name = "bfloat16" if q.dtype == np.uint16 else q.dtype.name
    scoring = describe(shape, dtype_name=name, queries=max(shape.T, int(index.max(initial=-1)) + 1), **options)
    return shape, scoring, index, j


def wide(x: Array) -> Array:
    """The numbers as float64, a copy."""
    return as_float32(x).astype(np.float64) if x.dtype == np.uint16 else x.astype(np.float64)


def spread_heads(x: Array, shape: Shape) -> Array:
    """Keys or values (..., G, S, d) as the query heads see them, batch + (H, S, d)."""
    x = wide(x).reshape(*shape.batch, shape.G, shape.S, x.shape[-1])
    return np.repeat(x, shape.H // max(shape.G, 1), axis=-3)


def _unit(x: Array) -> Array:
    """Rows of norm 1; a zero row stays zero."""
    largest = np.abs(x).max(-1, initial=0.0, keepdims=True)
    x = x / np.where(largest == 0, 1.0, largest)  # first, or the squares may overflow
    norm = np.sqrt((x * x).sum(-1, keepdims=True))
    return x / np.where(norm == 0, 1.0, norm)


def _logits(q: Array, k: Array, shape: Shape, scoring: Scoring, index: Array, j: Array) -> Array:
    """Dot product, scale, softcap, bias and ALiBi, hide; batch + (H, T, S)."""
    if scoring.mask is not None and scoring.mask.dtype != np.bool_:
        scoring = scoring._replace(mask=wide(scoring.mask))
    logits: Array = score(scoring, products(q, k, shape, scoring), index, j)
    return logits


def products(q: Array, k: Array, shape: Shape, scoring: Scoring) -> Array:
    """The dot products, batch + (H, T, S)."""
    q = wide(q).reshape(*shape.batch, shape.H, shape.T, shape.D)
    k = spread_heads(k, shape)
    if scoring.cosine:
        q, k = _unit(q), _unit(k)
    found: Array = q @ np.swapaxes(k, -1, -2)
    return found


def score(scoring: Scoring, products: Any, index: Any, j: Any) -> Any:
    """Dot products batch + (H, T, S) of queries (T,) and keys at j (S,) to logits; -inf where a key is hidden.

    The one formula between product and softmax, for NumPy arrays and for tensors of one float dtype.
    """
    xp = namespace(products)

    def by_head(x: Any) -> Any:  # (B, T, S) as batch + (1, T, S)
        return x.reshape((*(products.shape[:-3] if len(x) != 1 else ()), 1, *x.shape[1:]))

    seen = by_head(scoring.visible(index, j))
    s = products * scoring.scale[:, None, None]
    if scoring.log_n:
        n = seen.sum(-1)[..., None]
        s = s * xp.log(xp.asarray(n + (n == 0), dtype=s.dtype))
    s = capped(scoring, s)
    if scoring.alibi is not None:
        s = s - scoring.alibi[:, None, None] * by_head(abs(scoring.positions(index)[:, :, None] - j))
    if scoring.mask is not None and str(scoring.mask.dtype).endswith("bool"):
        seen = seen & scoring.mask
    elif scoring.mask is not None:
        s, seen = s + scoring.mask, seen & (scoring.mask != -np.inf)
    return xp.where(seen, s, -np.inf)  # selected, never added: a hidden NaN must not survive


def capped(scoring: Scoring, s: Any) -> Any:
    """Scaled logits within the call's bound, if it has one."""
    return s if scoring.softcap is None else scoring.softcap * namespace(s).tanh(s / scoring.softcap)


def _first_keys(scoring: Scoring, j: Array) -> Array | None:
    """(B, T): the lowest position of a key of each query's segment; -1: none. None: there are no segments."""
    if scoring.query_segments is None or scoring.key_segments is None:
        return None
    mine = scoring.query_segments[:, :, None] == scoring.key_segments[:, None, :]
    lowest = np.where(mine, j, np.inf).min(-1, initial=np.inf)
    return np.where(lowest == np.inf, -1, lowest).astype(np.int64)


def exponentials(s: Any) -> tuple[Any, Any, Any, Any, Any]:
    """What the softmax of rows of logits s (..., S) is made of, in units of ln 2: which keys are visible, s, its
    maximum m, s - m and 2^(s - m). For NumPy and JAX."""
    xp = namespace(s)
    seen = s != -np.inf
    s = xp.where(seen, xp.maximum(s / state.LN2, xp.finfo(s.dtype).min), s)  # the lowest number is no -inf
    m = s.max(-1, initial=-np.inf)
    d = s - m[..., None]
    vanishes = d < xp.finfo(s.dtype).minexp  # a subnormal weight would depend on a caller's flags
    d = xp.where(seen & ~vanishes, d, -np.inf)
    return seen, s, m, d, xp.exp2(d)


def sums_of(s: Any, j: Any, first_key: Any) -> tuple[Any, Any, Any]:
    """The state's columns for rows of logits s (..., S) at positions j, and exp(s - m). For NumPy and JAX."""
    xp = namespace(s)
    seen, s, m, d, e = exponentials(s)
    count = seen.sum(-1)
    l = e.sum(-1)  # noqa: E741
    h = xp.where(e == 0, 0.0, e * d).sum(-1)
    n = xp.maximum(count, 1)  # about m: a sum of the lowest numbers would overflow
    mean = xp.where(count == 0, 0.0, m + xp.where(seen, (s - m[..., None]) / n[..., None], 0.0).sum(-1))
    m2 = xp.where(seen, (s - mean[..., None]) ** 2, 0.0).sum(-1)
    low = xp.where(seen, s, np.inf).min(-1, initial=np.inf)
    first = xp.where(j == first_key, s, -np.inf).max(-1, initial=-np.inf)
    argmax = j[s.argmax(-1)] if len(j) else count
    # A visible NaN, or +inf, leaves no number to trust but the first logit.
    sums = xp.stack([m, l, h, (e * e).sum(-1), mean, m2, low], axis=-1)
    sums = xp.where(xp.isnan(l)[..., None], np.nan, sums)
    argmax = xp.where((count == 0) | xp.isnan(l), -1, argmax)
    sums = xp.concatenate([sums, first[..., None]], axis=-1)
    return sums, xp.stack([count, argmax], axis=-1), e


def weigh(e: Array, v: Array, seen: Array) -> Array:
    """Σ_j e_ij v_j over the keys that row i sees; 0 · inf of a hidden value must not happen."""
    wild = ~np.isfinite(v)
    acc = e @ np.where(wild, 0.0, v)
    for j in np.unique(np.nonzero(wild)[-2]):
        touched = seen[..., :, j, None] & wild[..., None, j, :]
        acc = acc + np.where(touched, e[..., :, j, None] * v[..., None, j, :], 0.0)
    return acc
