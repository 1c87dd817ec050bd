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
        sums, counts, e = _sums(s, j, 0 if first is None else first.reshape((*shape.batch, 1, shape.T, 1)))
        acc = None
        if v is not None:
            if scoring.dropout > 0:
                keep = dropout_keep(scoring.seed, scoring.dropout, shape.H, scoring.positions(index), j)
                e = np.where(keep.reshape(e.shape), e / (1.0 - scoring.dropout), 0.0)
            acc = _weigh(e, _spread_heads(v, shape), s != -np.inf)
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
    """The state of a's keys followed by b's, which begin `shift` (a.keys) positions later."""
    shift = a.keys if shift is None else shift
    with np.errstate(all="ignore"):
        ma, la, ha, e2a, mean_a, m2a, min_a, _ = np.moveaxis(a.sums, -1, 0)
        mb, lb, hb, e2b, mean_b, m2b, min_b, _ = np.moveaxis(b.sums, -1, 0)
        na, nb = a.counts[..., state.COUNT], b.counts[..., state.COUNT]
        m = np.maximum(ma, mb)
        wa = np.where(na == 0, 0.0, np.exp2(ma - m))
        wb = np.where(nb == 0, 0.0, np.exp2(mb - m))
        h = np.where(wa == 0, 0.0, wa * (ha + (ma - m) * la))
        h = h + np.where(wb == 0, 0.0, wb * (hb + (mb - m) * lb))
        part, gap = nb / np.maximum(na + nb, 1), mean_b - mean_a  # Chan, Golub, LeVeque 1979
        mean = np.where(na == 0, mean_b, mean_a + gap * part)
        m2 = m2a + m2b + np.where((na == 0) | (nb == 0), 0.0, gap**2 * na * part)
        first, first_keys = state.first_of(a, b, shift)
        e2, low = wa**2 * e2a + wb**2 * e2b, np.minimum(min_a, min_b)
        sums = np.stack([m, wa * la + wb * lb, h, e2, mean, m2, low, first], axis=-1)
        earlier, later = a.counts[..., state.ARGMAX], b.counts[..., state.ARGMAX] + shift
        argmax = np.where(np.isnan(m), -1, np.where(mb > ma, later, earlier))
        acc = None
        if a.acc is not None and b.acc is not None:
            acc = wa[..., None] * a.acc + wb[..., None] * b.acc
    return State(sums, np.stack([na + nb, argmax], axis=-1), acc, a.keys + b.keys, first_keys)


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
        w, w_sink = e / total, e_sink / total
        kept = np.ones_like(w)
        if scoring.dropout > 0:
            keep = dropout_keep(scoring.seed, scoring.dropout, shape.H, scoring.positions(index), j).reshape(w.shape)
            kept = keep / (1.0 - scoring.dropout)
        dout = np.where(exists, _wide(dout).reshape(*heads, v.shape[-1]), 0.0)
        values = _spread_heads(v, shape)
        dw = np.where(seen, kept * (dout @ np.swapaxes(values, -1, -2)), 0.0)
        dlse = 0.0 if dlogsumexp is None else np.where(exists, np.reshape(dlogsumexp, (*heads, 1)), 0.0)
        delta = (w * dw).sum(-1, keepdims=True) - dlse
        ds = np.where(seen, w * (dw - delta), 0.0)
        found = {"v": np.swapaxes(kept * w, -1, -2) @ dout, "sinks": -(w_sink * delta)}
        if mask is not None:
            found["mask"] = _unbroadcast(ds, np.shape(mask))
        slope, n = _slope_of_softcap(q, k, shape, scoring, index, j)
        ds = ds * slope
        wide_q = np.where(exists, _wide(q).reshape(*heads, shape.D), 0.0)
        wide_k = _spread_heads(k, shape)
        unit_q, unit_k = (_unit(x) if scoring.cosine else x for x in (wide_q, wide_k))
        found["scale"] = ds * n * (unit_q @ np.swapaxes(unit_k, -1, -2))
        ds = ds * n * scoring.scale[:, None, None]
        found["q"], found["k"] = ds @ unit_k, np.swapaxes(ds, -1, -2) @ unit_q
        if scoring.cosine:
            found["q"] = _through_unit(wide_q, found["q"])
            found["k"] = _through_unit(wide_k, found["k"])
    for name in ("k", "v"):  # heads of a group share a key
        each = shape.H // max(shape.G, 1)
        by_group = found[name].reshape(*shape.batch, shape.G, each, *found[name].shape[-2:])
        found[name] = by_group.sum(-3).reshape({"k": k, "v": v}[name].shape)
    found["q"] = found["q"].reshape(q.shape)
    for name in ("sinks", "scale"):
        found[name] = np.moveaxis(found[name], -3, 0).reshape(shape.H, -1).sum(-1)
    return found


def _slope_of_softcap(
    q: Array, k: Array, shape: Shape, scoring: Scoring, index: Array, j: Array
) -> tuple[Array | float, Array | float]:
    """d(capped) / d(scaled) of every logit, and ln(n_i) of every row; 1 where there is no such."""
    n: Array | float = 1.0
    if scoring.log_n:
        visible = scoring.visible(index, j).reshape(*shape.batch, 1, shape.T, shape.S)
        n = np.log(np.maximum(visible.sum(-1, keepdims=True), 1))
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


def _wide(x: Array) -> Array:
    bits = x.dtype == np.uint16  # bfloat16 is the upper half of a float32
    return ((x.astype(np.uint32) << 16).view(np.float32) if bits else x).astype(np.float64)


def _spread_heads(x: Array, shape: Shape) -> Array:
    """Keys or values (..., G, S, d) as the query heads see them, batch + (H, S, d)."""
    x = _wide(x).reshape(*shape.batch, shape.G, shape.S, x.shape[-1])
    return np.repeat(x, shape.H // max(shape.G, 1), axis=-3)


def _unit(x: Array) -> Array:
    """Rows of norm 1; a zero row stays zero."""
    largest = np.abs(x).max(-1, initial=0.0, keepdims=True)
    x = x / np.where(largest == 0, 1.0, largest)  # first, or the squares may overflow
    norm = np.sqrt((x * x).sum(-1, keepdims=True))
    return x / np.where(norm == 0, 1.0, norm)


def _logits(q: Array, k: Array, shape: Shape, scoring: Scoring, index: Array, j: Array) -> Array:
    """Dot product, scale, softcap, bias and ALiBi, hide; batch + (H, T, S)."""
    q = _wide(q).reshape(*shape.batch, shape.H, shape.T, shape.D)
    k = _spread_heads(k, shape)
    if scoring.cosine:
        q, k = _unit(q), _unit(k)
    if scoring.mask is not None and scoring.mask.dtype != np.bool_:
        scoring = scoring._replace(mask=_wide(scoring.mask))
    logits: Array = score(scoring, q @ np.swapaxes(k, -1, -2), index, j)
    return logits


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


def _sums(s: Array, j: Array, first_key: Array | int) -> tuple[Array, Array, Array]:
    """The state's columns for rows of logits s (..., S) at positions j, and exp(s - m)."""
    seen = s != -np.inf
    s = np.where(seen, np.maximum(s / state.LN2, np.finfo(np.float64).min), s)  # the lowest number is no -inf
    count = seen.sum(-1)
    m = s.max(-1, initial=-np.inf)
    d = np.where(seen, s - m[..., None], -np.inf)
    e = np.exp2(d)
    l = e.sum(-1)  # noqa: E741
    h = np.where(e == 0, 0.0, e * d).sum(-1)
    n = np.maximum(count, 1)  # about m: a sum of the lowest numbers would overflow
    mean = np.where(count == 0, 0.0, m + np.where(seen, (s - m[..., None]) / n[..., None], 0.0).sum(-1))
    m2 = np.where(seen, (s - mean[..., None]) ** 2, 0.0).sum(-1)
    low = np.where(seen, s, np.inf).min(-1, initial=np.inf)
    first = np.where(j == first_key, s, -np.inf).max(-1, initial=-np.inf)
    argmax = j[s.argmax(-1)] if len(j) else count
    # A visible NaN, or +inf, leaves no number to trust but the first logit.
    sums = np.stack([m, l, h, (e * e).sum(-1), mean, m2, low], axis=-1)
    sums = np.where(np.isnan(l)[..., None], np.nan, sums)
    argmax = np.where((count == 0) | np.isnan(l), -1, argmax)
    sums = np.concatenate([sums, first[..., None]], axis=-1)
    return sums, np.stack([count, argmax], axis=-1), e


def _weigh(e: Array, v: Array, seen: Array) -> Array:
    """Σ_j e_ij v_j over the keys that row i sees; 0 · inf of a hidden value must not happen."""
    wild = ~np.isfinite(v)
    acc = e @ np.where(wild, 0.0, v)
    for j in np.unique(np.nonzero(wild)[-2]):
        touched = seen[..., :, j, None] & wild[..., None, j, :]
        acc = acc + np.where(touched, e[..., :, j, None] * v[..., None, j, :], 0.0)
    return acc
