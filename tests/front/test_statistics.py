"""What the kernel returns beside the output: every field of rows and heads against the float64 reference within the
design's bounds, the laws of merging, and the exponential function.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import numpy as np
import pytest

import levelhead as lh
from levelhead import _core, reference, stats
from levelhead.state import State
from support import (
    DTYPES,
    ISAS,
    Array,
    check_heads,
    check_output,
    check_rows,
    existing,
    from_logits,
    isa,
    kind,
    magnitude,
    on_every_isa,
    qkv,
    running_on,
    same_bits,
    within,
)

__all__ = ["isa"]  # a fixture: pytest finds it by name


def observed(q: Array, k: Array, v: Array | None, **options: Any) -> None:
    """Rows, heads, logsumexp and output of observe() on every path, against the reference."""
    truth = reference.observe(q, k, v, **options)
    sinks, heads = options.get("sinks"), stats.heads(truth.rows, existing(q, options))
    tightened = q.dtype == np.float64
    M = max(magnitude(truth.rows.min), magnitude(truth.rows.max))
    M = M if sinks is None else max(M, magnitude(np.asarray(sinks)))
    for path, seen in on_every_isa(lambda: touched(lh.observe(q, k, v, **options))):
        check_rows(seen.rows, truth.rows, sinks=sinks, tightened=tightened)
        check_heads(seen.heads, heads, M=M, tightened=tightened)
        wide = np.float64 if tightened else np.float32
        assert seen.logsumexp.dtype == wide
        same_bits(seen.logsumexp, seen.rows.logsumexp.astype(wide))
        if v is not None:
            assert truth.output is not None
            largest = magnitude(v) / (1 - options.get("dropout", 0.0))
            check_output(seen.output, truth.output, largest, M=M, isa=path)


def touched(seen: lh.Observation) -> lh.Observation:
    """Reads the lazily computed fields while the chosen path is still selected."""
    if seen.state.acc is not None:
        _ = seen.output
    return seen


# ---- against the reference


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("T", "S"), [(1, 1), (1, 2), (3, 7), (7, 16), (13, 17), (33, 65), (6, 513), (97, 96), (2, 1030)]
)
def test_sizes(T: int, S: int, dtype: str) -> None:
    q, k, v = qkv((2, 4), T, S, D=16, E=5, groups=2, dtype=dtype, seed=T * S)
    for causal in (False, True):
        observed(q, k, v, causal=causal)
        observed(q, k, None, causal=causal)


H, T, S = 3, 21, 75


def options_by_name() -> dict[str, dict[str, Any]]:
    rng = np.random.default_rng(7)
    bias = rng.standard_normal((T, S)).astype("f4")
    return {
        "softcap": dict(softcap=0.5),
        "bool mask": dict(mask=rng.random((H, T, S)) < 0.3),
        "float mask": dict(mask=bias),
        "float mask that hides": dict(mask=np.where(bias > 0, bias, -np.inf)),
        "causal from before": dict(causal=True, query_start=-8),
        "window": dict(window=(6, 2)),
        "lengths": dict(key_lengths=np.array([40, 0])),
        "query lengths": dict(query_lengths=np.array([1, 7]), sinks=np.array([-np.inf, 1.0, 4.0])),
        "first key hidden": dict(window=(5, None), query_start=20),
        "segments": dict(segments=(rng.integers(0, 5, T), rng.integers(0, 5, S))),
        "alibi": dict(alibi=True),
        "cosine": dict(scale="cosine"),
        "log-n": dict(scale="log-n", causal=True),
        "unscaled": dict(scale="none"),
        "flat": dict(scale=0.0, mask=np.broadcast_to(np.arange(S) == 3, (T, S))),
        "sinks": dict(sinks=np.array([0.0, 30.0, -30.0])),
        "no sink in one head": dict(sinks=np.array([-np.inf, 1.0, 400.0]), key_lengths=0),
        "sinks above and below": dict(sinks=np.array([-1000.0, 1000.0, 2.0]), causal=True),
        "dropout": dict(dropout=0.5, seed=1),
    }


OPTIONS = options_by_name()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, dtype: str) -> None:
    q, k, v = qkv((2, H), T, S, D=24, dtype=dtype, seed=2)
    observed(q, k, v, **OPTIONS[name])
    observed(q, k, None, **OPTIONS[name])


@pytest.mark.parametrize("lead", [(), (2,), (2, 3), (2, 1, 3)], ids=str)
def test_ranks(lead: tuple[int, ...]) -> None:
    q, k, v = qkv(lead, 5, 19)
    sinks = np.linspace(-2, 2, lead[-1] if lead else 1)
    observed(q, k, v, causal=True, sinks=sinks)


# Where streamed sums lose precision: variance by differences of squares, entropy by differences of
# logarithms, a maximum that comes late or never.
LONG = 130


def hard_logits() -> dict[str, Array]:
    rng = np.random.default_rng(11)
    s = rng.standard_normal((8, LONG))
    cases = {"plain": s, "one key": s[:, :1], "two keys": s[:, :2]}
    for where in (0, 1, 15, 16, 63, 64, 100, LONG - 1):
        for outlier in (-1000.0, 1000.0):
            cases[f"{outlier:+.0f} at {where}"] = np.where(np.arange(LONG) == where, outlier, s)
    for offset in (-1e4, -300.0, 88.0, 1e3, 1e4):
        cases[f"offset {offset:+.0f}"] = s + offset
    cases |= {
        "constant": np.full((8, LONG), 0.1),
        "constant and far": np.full((8, LONG), -12345.678),
        "rising": np.sort(s, axis=-1) * 20,
        "falling": -np.sort(-s, axis=-1) * 20,
        "tied": np.where(np.arange(LONG) % 9 == 4, 3.0, 0.0) + np.zeros((8, 1)),
        "wide": s * 40,
        "two camps": np.where(np.arange(LONG) % 2, 50.0, -50.0) + s,
        "mostly hidden": np.where(rng.random((8, LONG)) < 0.97, -np.inf, s),
        "one seen": np.where(np.arange(LONG) == 77, s, -np.inf),
        "none seen": np.full((8, LONG), -np.inf),
        "some rows empty": np.where(np.arange(8)[:, None] % 2, s, -np.inf),
        "late start": np.where(np.arange(LONG) < 100, -np.inf, s),
        "huge": np.where(np.arange(LONG) == 9, 1e30, s),
        "hugely negative": np.where(np.arange(LONG) == 9, -1e30, s),
        "both": np.where(np.arange(LONG) % 2, 1e30, -1e30) + np.zeros((8, 1)),
    }
    return {name: case.astype("f4") for name, case in cases.items()}


HARD = hard_logits()


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("name", HARD)
def test_logits_that_break_streamed_sums(name: str, dtype: str) -> None:
    q, k, v, mask = from_logits(HARD[name], dtype)
    with np.errstate(over="ignore"):  # (1e30)² is beyond float32: the allowed values of var are below
        observed_logits(q, k, v, mask, overflows=name in ("huge", "hugely negative", "both"))


def observed_logits(q: Array, k: Array, v: Array, mask: Array, overflows: bool) -> None:
    if not overflows or q.dtype == np.float64:
        observed(q, k, v, mask=mask)
        observed(q, k, None, mask=mask, sinks=np.array([2.0]))
        return
    truth = reference.observe(q, k, v, mask=mask)
    for path, seen in on_every_isa(lambda: touched(lh.observe(q, k, v, mask=mask))):
        for field in ("mean", "min", "max", "logsumexp", "entropy", "top1", "sum_p2", "first"):
            given, wanted = getattr(seen.rows, field), getattr(truth.rows, field)
            np.testing.assert_allclose(given, wanted, rtol=1e-5, atol=1e-5, err_msg=field)
        np.testing.assert_array_equal(seen.rows.count, truth.rows.count)
        np.testing.assert_array_equal(seen.rows.argmax, truth.rows.argmax)
        assert (seen.rows.var >= 1e36).all()
        assert truth.output is not None
        check_output(seen.output, truth.output, magnitude(v), isa=path)


def test_known_values() -> None:
    # Natural logarithms, nats and population variance: the units are part of the contract.
    q, k, v, mask = from_logits(np.log([[1.0, 2.0, 3.0, 2.0]]), "float64")
    p = np.array([1, 2, 3, 2]) / 8
    s = np.log([1, 2, 3, 2])
    for _, seen in on_every_isa(lambda: touched(lh.observe(q, k, v, mask=mask))):
        rows = seen.rows
        for given, wanted in (
            (rows.logsumexp, math.log(8)),
            (rows.entropy, -(p * np.log(p)).sum()),
            (rows.sum_p2, (p * p).sum()),
            (rows.top1, 3 / 8),
            (rows.first, 1 / 8),
            (rows.mean, s.mean()),
            (rows.var, s.var()),
            (seen.output[0], p @ v),
        ):
            np.testing.assert_allclose(np.ravel(given), np.ravel(wanted), rtol=1e-14)
        assert (rows.count[0], rows.argmax[0], rows.sink[0]) == (4, 2, 0)
    for _, seen in on_every_isa(lambda: lh.observe(q, k, mask=mask, sinks=np.log([8.0]), scale=0.0)):
        np.testing.assert_allclose(seen.rows.logsumexp, math.log(16), rtol=1e-14)
        np.testing.assert_allclose(seen.rows.sink, 0.5, rtol=1e-14)


def test_uniform_logits_say_ln_n() -> None:
    for n in (2, 3, 16, 100, 1030):
        q, k, v, mask = from_logits(np.zeros((2, n)))
        for _, seen in on_every_isa(lambda a=(q, k, v, mask): lh.observe(*a[:3], mask=a[3])):
            np.testing.assert_allclose(seen.rows.logsumexp, math.log(n), atol=1e-5)
            np.testing.assert_allclose(seen.rows.entropy, math.log(n), atol=1e-5)
            np.testing.assert_allclose(seen.heads.normalised_entropy, 1.0, atol=1e-5)
            np.testing.assert_array_equal(seen.rows.var, 0.0)
            np.testing.assert_array_equal(seen.rows.argmax, 0)  # the first of equals


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_first_maximum_is_found_wherever_it_lies(dtype: str) -> None:
    S = 664  # two blocks of keys, the second not of whole legs in any vector width
    logits = np.random.default_rng(3).standard_normal((S, S))
    places = np.arange(S)
    logits[places, places] = 9.0
    logits[places, np.minimum(places + 37, S - 1)] = 9.0  # its equal, later
    q, k, v, mask = from_logits(logits, dtype)
    for _, seen in on_every_isa(lambda: lh.observe(q, k, v, mask=mask)):
        np.testing.assert_array_equal(seen.rows.argmax, places)
    for few in (slice(0, 3), slice(300, 304), slice(S - 2, S)):  # which are streamed
        for _, seen in on_every_isa(lambda i=few: lh.observe(q[i], k, v, mask=mask[i])):
            np.testing.assert_array_equal(seen.rows.argmax, places[few])


@pytest.mark.parametrize("offset", [0.5, 1.0, 1.5, 1.7, 1.75, 2.0, 3.0])
def test_the_variance_of_logits_that_lie_off_zero(offset: float) -> None:
    # Below and above the mean from which deviations are no longer computed from the sum of squares.
    q, k, v, mask = from_logits(np.random.default_rng(4).standard_normal((64, 600)) + offset)
    exact = mask.astype("f8").var(axis=-1)
    for _, seen in on_every_isa(lambda: lh.observe(q, k, v, mask=mask)):
        np.testing.assert_allclose(seen.rows.var, exact, rtol=2e-6)


def test_squares_that_overflow_do_not_make_the_variance_infinite() -> None:
    half = np.where(np.arange(64) % 2, 2.4e18, 0.0)  # 32 squares are too much, 64 deviations not
    for logits, exact in ((np.full(130, 1e20), 0.0), (half, 1.44e36)):
        q, k, v, mask = from_logits(np.stack([logits, -logits]))
        for _, seen in on_every_isa(lambda a=(q, k, v, mask): lh.observe(*a[:3], mask=a[3])):
            np.testing.assert_allclose(seen.rows.var, exact, rtol=1e-5, atol=1e30)


def test_a_nan_among_hidden_keys_does_not_change_how_many_are_seen() -> None:
    logits = np.zeros((3, 600))
    logits[1:, 40] = -np.inf
    logits[1, 40 + 128] = logits[2, 40 + 64] = np.nan  # the same lanes as the hidden key, later
    q, k, v, mask = from_logits(logits)
    for _, seen in on_every_isa(lambda: lh.observe(q, k, v, mask=mask)):
        np.testing.assert_array_equal(seen.rows.count, [600, 599, 599])
        assert np.isnan(seen.rows.max).tolist() == [False, True, True]


# ---- output bits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sinks", [None, [0.5, -1.0, 300.0], [-np.inf, 0.0, -300.0]], ids=str)
def test_observed_output_has_the_bits_of_attention(isa: str, dtype: str, sinks: Any) -> None:
    sizes = ((1, 5), (6, 16), (7, 33), (97, 130), (3, 1030), (4, 0))
    for number, (T, S) in enumerate(sizes):
        q, k, v = qkv((2, 3), T, S, D=16, E=11, dtype=dtype, seed=number)
        for options in (
            {},
            dict(causal=True, query_start=-2),
            dict(window=(4, 3), softcap=2.0),
            dict(key_lengths=np.array([S // 2, 0]), alibi=True),
            dict(dropout=0.2, seed=3),
        ):
            seen = lh.observe(q, k, v, sinks=sinks, **options)
            same_bits(seen.output, lh.attention(q, k, v, sinks=sinks, **options))


# ---- merging


def parts(q: Array, k: Array, v: Array | None, cuts: list[int], **options: Any) -> list[lh.Observation]:
    """Observations of the keys between the cuts, each with its own positions."""
    S, T = k.shape[-2], q.shape[-2]
    bounds = [0, *cuts, S]
    start = options.pop("query_start", S - T)
    mask = options.pop("mask", None)
    found = []
    for a, b in itertools.pairwise(bounds):
        some = None if v is None else v[..., a:b, :]
        own = options | ({} if mask is None else {"mask": mask[..., a:b]})
        found.append(lh.observe(q, k[..., a:b, :], some, query_start=start - a, **own))
    return found


def fold(found: list[lh.Observation]) -> lh.Observation:
    return functools.reduce(lh.merge, found)


MERGED: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": dict(causal=True),
    "rows that start before": dict(causal=True, query_start=-6),
    "window": dict(window=(12, 1)),
    "sinks": dict(sinks=np.array([1.0, -np.inf, 40.0])),
    "softcap": dict(softcap=1.0, causal=True),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MERGED)
@pytest.mark.parametrize("values", [True, False])
def test_parts_make_the_whole(name: str, dtype: str, values: bool) -> None:
    options = MERGED[name]
    q, k, v = qkv((2, 3), 12, 64, D=8, dtype=dtype, seed=4)
    given = v if values else None
    truth = reference.observe(q, k, given, **options)
    M = max(magnitude(truth.rows.min), magnitude(truth.rows.max))
    for cuts in ([32], [1], [63], [0], [64], [20, 20, 41], list(range(1, 64))):
        for path, seen in on_every_isa(lambda c=cuts: touched(fold(parts(q, k, given, c, **options)))):
            assert seen.keys == 64
            check_rows(seen.rows, truth.rows, sinks=options.get("sinks"), tightened=dtype == "float64")
            if values:
                assert truth.output is not None
                check_output(seen.output, truth.output, magnitude(v), M=M, isa=path)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_identity_on_both_sides_changes_no_bit(isa: str, dtype: str) -> None:
    q, k, v = qkv((2, 3), 12, 40, D=8, dtype=dtype)
    for values in (v, None):
        for options in ({}, dict(causal=True, query_start=-5, sinks=np.array([0.0, 1.0, 2.0]))):
            seen = lh.observe(q, k, values, **options)
            nothing = seen.identity()
            for merged in (lh.merge(nothing, seen), lh.merge(seen, nothing)):
                same_state(merged.state, seen.state)
                if values is not None:
                    same_bits(merged.output, seen.output)
            same_state(lh.merge(nothing, nothing).state, nothing.state)


def same_state(a: State, b: State) -> None:
    same_bits(a.sums, b.sums)
    same_bits(a.counts, b.counts)
    assert a.keys == b.keys
    assert (a.acc is None) == (b.acc is None)
    if a.acc is not None and b.acc is not None:
        same_bits(a.acc, b.acc)


def test_empty_parts_are_identities_whatever_made_them_empty(isa: str) -> None:
    q, k, v = qkv((2,), 6, 20)
    seen = lh.observe(q, k, v)
    hidden = lh.observe(q, k[:, :5], v[:, :5], mask=np.zeros((6, 5), bool))
    none = lh.observe(q, k[:, :0], v[:, :0])
    for empty in (hidden, none):
        both = lh.merge(empty, empty)
        assert np.isneginf(both.logsumexp).all()
        assert (both.output == 0).all()
        assert (both.rows.argmax == -1).all()
        for merged in (lh.merge(empty, seen), lh.merge(seen, empty)):
            same_bits(merged.output, seen.output)
            same_bits(merged.logsumexp, seen.logsumexp)
    moved = lh.merge(hidden, seen)
    np.testing.assert_array_equal(moved.rows.argmax, seen.rows.argmax + 5)


EXTREME = ["offset -10000", "offset +10000", "huge", "hugely negative", "both", "mostly hidden"]
EXTREME += ["+1000 at 0", "+1000 at 129", "-1000 at 64", "late start", "two camps", "none seen"]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("name", ["plain", *EXTREME])
def test_merging_is_associative(name: str, dtype: str) -> None:
    q, k, v, mask = from_logits(HARD[name], dtype)
    truth = reference.observe(q, k, v, mask=mask)
    beyond = {"huge", "hugely negative", "both"} & {name} and dtype != "float64"
    # Whole numbers as natural logits, but not in the kernel's units of ln 2: rounded, as any logit.
    M = 1e4 if name.startswith("offset") else 0.0
    for path, three in on_every_isa(lambda: parts(q, k, v, [40, 77], mask=mask)):
        a, b, c = three
        for seen in (lh.merge(lh.merge(a, b), c), lh.merge(a, lh.merge(b, c))):
            if not beyond:
                check_rows(seen.rows, truth.rows, tightened=dtype == "float64")
            np.testing.assert_array_equal(seen.rows.argmax, truth.rows.argmax)
            np.testing.assert_array_equal(seen.rows.count, truth.rows.count)
            assert not np.isnan(seen.logsumexp).any()
            assert truth.output is not None
            check_output(seen.output, truth.output, magnitude(v), M=M, isa=path)


@pytest.mark.parametrize("dtype", DTYPES)
def test_error_does_not_grow_with_the_number_of_splits(dtype: str) -> None:
    q, k, v = qkv((2,), 9, 256, D=32, dtype=dtype, seed=6)
    truth = reference.observe(q, k, v)
    assert truth.output is not None
    for splits in (1, 2, 3, 4, 8, 16, 32, 64):
        cuts = [256 * i // splits for i in range(1, splits)]
        for path, seen in on_every_isa(lambda c=cuts: touched(fold(parts(q, k, v, c)))):
            check_rows(seen.rows, truth.rows, tightened=dtype == "float64")
            check_output(seen.output, truth.output, magnitude(v), isa=path)


def test_scores_at_the_end_of_float16() -> None:
    # 65504 is the largest float16: products overflow it by far, float32 states do not.
    rng = np.random.default_rng(3)
    q, k = np.full((4, 2), 250, "f2"), rng.choice([-250, 250], (90, 2)).astype("f2")
    v = rng.standard_normal((90, 3)).astype("f2")
    truth = reference.observe(q, k, v, scale=1.0)
    assert magnitude(truth.rows.max) == 125000
    assert truth.output is not None
    for path, seen in on_every_isa(lambda: touched(fold(parts(q, k, v, [30, 60], scale=1.0)))):
        check_rows(seen.rows, truth.rows)
        check_output(seen.output, truth.output, magnitude(v), isa=path)


def test_the_compiled_merge_is_the_written_one(isa: str) -> None:
    rng = np.random.default_rng(8)
    q, k, v = qkv((2, 3), 10, 60, D=8, dtype="float64")
    mask = np.where(rng.random((10, 60)) < 0.1, rng.standard_normal((10, 60)) * 30, -np.inf)
    a, b = parts(q, k, v, [31], mask=mask)
    merged = lh.merge(a, b).state
    truth = reference.merge(a.state, b.state)
    np.testing.assert_array_equal(merged.counts, truth.counts)
    np.testing.assert_allclose(merged.sums, truth.sums, rtol=1e-12, atol=1e-12)
    assert merged.acc is not None
    assert truth.acc is not None
    np.testing.assert_allclose(merged.acc, truth.acc, rtol=1e-12, atol=1e-12)


def test_a_nan_survives_merging_on_either_side(isa: str) -> None:
    q, k, v = qkv((1,), 5, 30)
    k[0, 20, 0] = np.nan
    sick, well = lh.observe(q, k, v), lh.observe(q, k[:, :9], v[:, :9])
    for merged in (lh.merge(sick, well), lh.merge(well, sick)):
        assert np.isnan(merged.logsumexp).all()
        assert np.isnan(merged.output).all()
        assert (merged.rows.argmax == -1).all()
        assert (merged.rows.count == 39).all()


# ---- the exponential


def exponential(x: Array) -> Array:
    out = np.full_like(x, np.nan)
    _core.exponential(x, out)
    return out


# The least x to try, how many, and the binade in which a result may already be flushed: above
# it every digit counts, below it everything is zero.
EXPONENTS = {"float32": (-130.0, 400_000, -126), "float64": (-1030.0, 100_000, -1022)}


@pytest.mark.parametrize("dtype", EXPONENTS)
def test_the_exponential_is_within_two_units_in_the_last_place(isa: str, dtype: str) -> None:
    low, n, flushed = EXPONENTS[dtype]
    near = -np.logspace(-12, 0, 50_000)
    x = np.concatenate([np.linspace(low, 0, n), near]).astype(dtype)
    exact = np.exp2(x.astype(np.longdouble))
    given, kept = exponential(x), exact >= np.ldexp(1.0, flushed + 1)
    error = np.abs((given - exact) / np.spacing(exact.astype(dtype)))
    assert error[kept].max() <= 2, f"{error[kept].max()} ULP at {x[kept][error[kept].argmax()]!r}"
    between = ~kept & (exact >= np.finfo(dtype).tiny)
    assert ((given == 0) | (error <= 2))[between].all()


@pytest.mark.parametrize("dtype", EXPONENTS)
def test_the_exponential_never_gives_a_subnormal(isa: str, dtype: str) -> None:
    # Subnormal weights would cost a hundred cycles each, and change with a caller's FTZ flag.
    tiny = np.finfo(dtype).tiny
    edge = math.log2(tiny)
    x = np.concatenate([np.linspace(1.5 * edge, 0.9 * edge, 200_000), [-1e30, -np.inf]])
    given, exact = exponential(x.astype(dtype)), np.exp2(x.astype(dtype).astype(np.longdouble))
    assert ((given == 0) | (given >= tiny)).all(), given[(given != 0) & (given < tiny)]
    assert (given[exact < tiny] == 0).all()


def test_the_exponential_at_its_ends(isa: str) -> None:
    for dtype in EXPONENTS:
        ends = np.array([0.0, -0.0, -np.inf, -np.finfo(dtype).max, np.nan], dtype)
        np.testing.assert_array_equal(exponential(ends), [1.0, 1.0, 0.0, 0.0, np.nan])


def test_empty_and_odd_lengths_of_the_exponential() -> None:
    with running_on(ISAS[0]):
        for n in (0, 1, 3, 7, 8, 9, 17):
            x = -np.arange(n, dtype=kind("float32"))
            within(exponential(x), np.exp2(x.astype("f8")), 1e-6, "exponential")


def test_the_core_keeps_the_logit_of_any_key_as_the_first(isa: str) -> None:
    """`first_keys` names one key for each row; -1, or a key that the row does not see: weight 0."""
    q, k, _ = qkv((2, 3), 40, 300, 16)
    first = np.random.default_rng(4).integers(-1, 300, (2, 40))
    state = lh.observe(q, k, causal=True).state
    _core.forward(
        q, k, None, sums=state.sums, counts=state.counts, scale=np.full(3, 0.25), causal=True,
        query_start=np.full(2, 260), first_keys=first,
    )  # fmt: skip
    logits = reference.logits(q, k, causal=True)
    chosen = np.take_along_axis(logits, np.maximum(first, 0)[:, None, :, None], -1)[..., 0]
    weights = np.exp(chosen - reference.observe(q, k, causal=True).logsumexp)
    found = stats.rows(state.sums, state.counts, None).first
    np.testing.assert_allclose(found, np.where(first[:, None] < 0, 0.0, weights), rtol=1e-5, atol=1e-7)
    assert (found > 0).any() and (found == 0).any()
