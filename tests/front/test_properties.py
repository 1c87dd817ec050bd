"""Hypothesis over structure: sizes from zero to just past a tile, grouped heads, layouts, masks, magnitudes and options
in any combination, against the reference. The numbers themselves come from a seeded generator: here shapes find errors,
random numbers do not.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import levelhead as lh
from levelhead import reference, stats
from support import (
    DTYPES,
    ISAS,
    Array,
    check_heads,
    check_output,
    check_rows,
    existing,
    kind,
    magnitude,
    running_on,
    same_bits,
)


def examples(n: int) -> settings:
    slow = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    return settings(max_examples=n, derandomize=True, deadline=None, database=None, suppress_health_check=slow)


LENGTH = st.one_of(
    st.integers(0, 3),
    st.sampled_from([5, 6, 7, 8, 9, 11, 12, 13, 15, 16, 17, 23, 24, 25, 31, 32, 33]),
    st.sampled_from([47, 48, 49, 63, 64, 65, 95, 96, 97, 127, 128, 129]),
)
WIDTH = st.one_of(st.integers(0, 3), st.sampled_from([4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65]))
LAYOUTS = ("plain", "every other", "backwards", "transposed", "shifted", "read-only", "repeated")


def laid_out(x: Array, layout: str) -> Array:
    """x in that memory layout; "repeated" repeats its first row, by stride zero."""
    if layout == "every other":
        room = np.zeros([2 * n for n in x.shape], x.dtype)
        view = room[(slice(1, None, 2),) * x.ndim]
    elif layout == "backwards":
        view = np.zeros_like(x)[(slice(None, None, -1),) * x.ndim]
    elif layout == "transposed":
        view = np.zeros(x.shape[::-1], x.dtype).T
    elif layout == "shifted":
        view = np.zeros(x.size + 1, x.dtype)[1:].reshape(x.shape)
    elif layout == "repeated" and x.shape[-2]:
        return np.broadcast_to(x[..., :1, :], x.shape)
    else:
        view = x.copy()
    view[...] = x
    view.flags.writeable = layout != "read-only"
    return view


@dataclass
class Problem:
    q: Array
    k: Array
    v: Array
    options: dict[str, Any]
    layouts: tuple[str, ...] = field(default_factory=tuple)

    def __repr__(self) -> str:
        shapes = [x.shape for x in (self.q, self.k, self.v)]
        return f"Problem({self.q.dtype}, {shapes}, {self.layouts}, {self.options})"


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    dtype = draw(st.sampled_from(DTYPES))
    batch = draw(st.sampled_from([(), (1,), (2,), (3,), (2, 2), (1, 2, 1), (), (2,), (0,)]))
    G, ratio = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2), (3, 5), (1, 8), (5, 1)]))
    T, S, D, E = draw(LENGTH), draw(LENGTH), draw(WIDTH), draw(WIDTH)
    assume(T * S * G * ratio * max(1, int(np.prod(batch))) <= 60_000)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = draw(st.sampled_from([1.0, 1.0, 1e-3, 30.0]))
    one_head = batch == () and (G, ratio) == (1, 1) and draw(st.booleans())
    lead, kv = (*batch, G * ratio), (*batch, G)
    shapes = ((T, D), (S, D), (S, E))
    if not one_head:
        shapes = ((*lead, T, D), (*kv, S, D), (*kv, S, E))
    arrays = [rng.standard_normal(shape).astype(kind(dtype)) for shape in shapes]
    arrays[0] = (arrays[0].astype("f8") * size).astype(kind(dtype))
    layouts = tuple(draw(st.sampled_from(LAYOUTS)) for _ in arrays)
    q, k, v = (laid_out(x, layout) for x, layout in zip(arrays, layouts, strict=True))
    return Problem(q, k, v, draw(options(rng, batch, G * ratio, T, S, dtype)), layouts)


@st.composite
def options(
    draw: st.DrawFn, rng: np.random.Generator, batch: tuple[int, ...], H: int, T: int, S: int, dtype: str
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    wanted = draw(st.sets(st.sampled_from(NAMES), max_size=5))
    if "scale" in wanted:
        rules = [0.3, -0.5, 0.0, "none", "1/d_k", "1/sqrt(d)", "cosine", "log-n", "per head"]
        rule = draw(st.sampled_from(rules))
        found["scale"] = rng.uniform(-1, 1, H) if rule == "per head" else rule
    if "causal" in wanted:
        found["causal"] = True
    if "window" in wanted:
        side = st.one_of(st.none(), st.integers(0, 3), st.integers(4, 70))
        found["window"] = (draw(side), draw(side))
    if "mask" in wanted:
        found["mask"] = draw(masks(rng, batch, H, T, S, dtype))
    if "softcap" in wanted:
        found["softcap"] = draw(st.sampled_from([0.5, 5.0, 50.0]))
    if "sinks" in wanted:
        found["sinks"] = rng.choice([-np.inf, -30.0, -1.0, 0.0, 2.0, 30.0], H)
    if "alibi" in wanted:
        found["alibi"] = draw(st.sampled_from([True, rng.uniform(-0.1, 0.5, H)]))
    if "key_lengths" in wanted:
        found["key_lengths"] = rng.integers(0, S + 1, draw(st.sampled_from([(), batch])))
    if "query_lengths" in wanted:
        found["query_lengths"] = rng.integers(0, T + 1, draw(st.sampled_from([(), batch])))
    if "query_start" in wanted:
        shape = draw(st.sampled_from([(), batch]))
        found["query_start"] = rng.integers(-T - 3, S + 4, shape)
    if "segments" in wanted:
        n = draw(st.integers(1, 4))
        ids = rng.integers(0, n, (*batch, T)), np.sort(rng.integers(0, n, (*batch, S)), axis=-1)
        found["segments"] = ids
    if "dropout" in wanted:
        found["dropout"], found["seed"] = draw(st.sampled_from([0.1, 0.5])), 77
    return found


NAMES = ("scale", "causal", "window", "mask", "softcap", "sinks", "alibi", "key_lengths")
NAMES += ("query_lengths", "query_start", "segments", "dropout")


@st.composite
def masks(
    draw: st.DrawFn, rng: np.random.Generator, batch: tuple[int, ...], H: int, T: int, S: int, dtype: str
) -> Array:
    shape = tuple(draw(st.sampled_from([1, n])) for n in (*batch, H, T, S))
    shape = shape[draw(st.integers(0, len(shape) - 2)) :]
    seen = rng.random(shape) < draw(st.sampled_from([0.0, 0.1, 0.5, 0.95, 1.0]))
    made = draw(st.sampled_from(["bool", "float32", dtype]))
    mask = seen if made == "bool" else np.where(seen, rng.standard_normal(shape), -np.inf).astype(kind(made))
    return laid_out(mask, draw(st.sampled_from(LAYOUTS[:-1])))


def largest_logit(x: Problem) -> float:
    """M: also of the products before a cap, a bias or a distance, whose rounding remains."""
    scale = x.options.get("scale")
    bare = magnitude(reference.logits(x.q, x.k, scale=None if is_log_n(scale) else scale))
    bare *= 5 if is_log_n(scale) else 1  # > ln 129
    return max(bare, magnitude(reference.logits(x.q, x.k, **x.options)))


def is_log_n(scale: Any) -> bool:
    return isinstance(scale, str) and scale == "log-n"


@examples(600)
@given(x=problems(), isa=st.sampled_from(ISAS), threads=st.sampled_from([1, 2, 3]))
def test_output_and_statistics_are_the_references(x: Problem, isa: str, threads: int) -> None:
    truth = reference.observe(x.q, x.k, x.v, **x.options)
    assert truth.output is not None
    M = largest_logit(x)
    with running_on(isa):
        out = lh.attention(x.q, x.k, x.v, threads=threads, **x.options)
        seen = lh.observe(x.q, x.k, x.v, threads=threads, **x.options)
        same_bits(seen.output, out)
        alone = lh.observe(x.q, x.k, threads=threads, **x.options)
    largest = magnitude(x.v) / (1 - x.options.get("dropout", 0.0))
    check_output(out, truth.output, largest, M=M)
    sinks, tightened = x.options.get("sinks"), x.q.dtype == np.float64
    for rows in (seen.rows, alone.rows):
        wanted = with_argmax(truth.rows, rows, x, M)
        check_rows(rows, wanted, M=M, sinks=sinks, tightened=tightened)
    if not near_saturation(truth.rows, M):
        where = dict(max_query=seen.heads.max_query, max_key=seen.heads.max_key)  # by argmax
        heads = replace(stats.heads(truth.rows, existing(x.q, x.options)), **where)
        reach = M if sinks is None else max(M, magnitude(sinks))
        check_heads(seen.heads, heads, M=reach, tightened=tightened)


def with_argmax(wanted: stats.Rows, found: stats.Rows, x: Problem, M: float) -> stats.Rows:
    """`wanted`; where several logits are the maximum within the bound, with the one that was returned."""
    s = reference.logits(x.q, x.k, **x.options)
    if s.shape[-1] == 0:
        return wanted
    there = np.take_along_axis(s, np.maximum(found.argmax, 0)[..., None], -1)[..., 0]
    with np.errstate(invalid="ignore"):  # -inf - -inf in rows without visible keys
        fair = (found.argmax >= 0) & (wanted.max - there <= 1e-5 * (1 + M))
    return replace(wanted, argmax=np.where(fair, found.argmax, wanted.argmax))


def near_saturation(rows: stats.Rows, M: float) -> bool:
    """Whether a row is too close to the threshold to count it with certainty."""
    return bool((np.abs(rows.top1 - stats.SATURATED_ROW) <= 2e-6 * (1 + M)).any())


@examples(400)
@given(x=problems(), isa=st.sampled_from(ISAS), share=st.lists(st.floats(0, 1), min_size=1, max_size=4))
def test_any_split_of_the_keys_merges_to_the_whole(x: Problem, isa: str, share: Any) -> None:
    # Without options that count positions from the first key of a part, or the keys of a part.
    for name in ("key_lengths", "dropout", "seed", "segments"):
        x.options.pop(name, None)
    if is_log_n(x.options.get("scale")):
        del x.options["scale"]
    S, T = x.k.shape[-2], x.q.shape[-2]
    start, mask = x.options.pop("query_start", S - T), x.options.pop("mask", None)
    if mask is not None:
        mask = np.broadcast_to(mask, (*mask.shape[:-1], S))
    bounds = [0, *sorted(round(part * S) for part in share), S]
    whole = dict(x.options, query_start=start, mask=mask)
    truth = reference.observe(x.q, x.k, x.v, **whole)
    assert truth.output is not None
    with running_on(isa):
        merged = None
        for a, b in itertools.pairwise(bounds):
            own = dict(whole, query_start=start - a, mask=None if mask is None else mask[..., a:b])
            part = lh.observe(x.q, x.k[..., a:b, :], x.v[..., a:b, :], **own)
            merged = part if merged is None else lh.merge(merged, part)
        assert merged is not None
        output = merged.output
    x.options = whole
    M = largest_logit(x)
    check_output(output, truth.output, magnitude(x.v), M=M)
    check_rows(
        merged.rows,
        with_argmax(truth.rows, merged.rows, x, M),
        M=M,
        sinks=whole.get("sinks"),
        tightened=x.q.dtype == np.float64,
    )


@examples(400)
@given(x=problems(), isa=st.sampled_from(ISAS), poison=st.sampled_from([np.nan, np.inf, -np.inf]))
def test_what_nobody_sees_changes_nothing(x: Problem, isa: str, poison: float) -> None:
    s = reference.logits(x.q, x.k, **x.options)
    blind = np.isneginf(s).all(axis=-2)  # by query head; a key serves all heads of its group
    kv = x.k.shape[:-2]
    if x.k.ndim > 2:
        G = kv[-1]
        blind = blind.reshape(*kv[:-1], G, blind.shape[-2] // G, blind.shape[-1]).all(axis=-2)
    k, v = x.k.copy(), x.v.copy()
    k[blind] = v[blind] = 0
    with running_on(isa):
        clean = lh.observe(x.q, k, v, **x.options)
        k[blind] = v[blind] = poison
        seen = lh.observe(x.q, k, v, **x.options)
        same_bits(clean.output, seen.output)
        same_bits(lh.attention(x.q, k, v, **x.options), seen.output)
    same_bits(clean.state.sums, seen.state.sums)
    same_bits(clean.state.counts, seen.state.counts)


@examples(400)
@given(x=problems(), isa=st.sampled_from(ISAS))
def test_layout_threads_and_company_leave_the_bits_alone(x: Problem, isa: str) -> None:
    solid = [np.ascontiguousarray(a) for a in (x.q, x.k, x.v)]
    with running_on(isa):
        whole = lh.attention(*solid, threads=1, **x.options)
        same_bits(lh.attention(x.q, x.k, x.v, threads=3, **x.options), whole)
        out = laid_out(np.zeros_like(whole), "every other")
        lh.attention(x.q, x.k, x.v, out=out, threads=2, **x.options)
        same_bits(out.copy(order="C"), whole)
