"""Classes of bugs that other attention kernels have had, each with its test: NaN and inf in hidden places, rows without
visible keys, empty dimensions, infinities, index widths, memory of other libraries.
"""

from __future__ import annotations

import gc
import itertools
import math
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import levelhead as lh
from levelhead import reference
from support import (
    DTYPES,
    IN_PAIRS,
    Array,
    agree,
    check_output,
    check_rows,
    from_logits,
    isa,
    kind,
    magnitude,
    on_every_isa,
    qkv,
    same_bits,
)

__all__ = ["isa"]  # a fixture: pytest finds it by name

POISON = (np.nan, np.inf, -np.inf)


def state_bits(q: Array, k: Array, v: Array, **options: Any) -> list[Array]:
    state = lh.observe(q, k, v, **options).state
    assert state.acc is not None
    return [lh.attention(q, k, v, **options), state.sums, state.counts, state.acc]


# ---- hidden poison (flash-attention#1745, #2374; vllm#936; openvino#30619)

T, S = 20, 83


def hiders() -> dict[str, tuple[dict[str, Any], Array]]:
    """Options, and which keys (T, S) they hide from which rows."""
    rng = np.random.default_rng(1)
    i, j = np.arange(T)[:, None], np.arange(S)
    p = S - T + i
    ids = (rng.integers(0, 3, T), rng.integers(0, 4, S))  # no query has the last id
    holes = rng.random((T, S)) < 0.5
    holes[:, 40:60] = False
    bias = rng.standard_normal((T, S)).astype("f4")
    return {
        "causal": (dict(causal=True, query_start=40), j > 40 + i),
        "causal, few visible": (dict(causal=True, query_start=-5), j > i - 5),
        "window": (dict(window=(6, 3)), (j < p - 6) | (j > p + 3)),
        "lengths": (dict(key_lengths=np.array(37)), np.broadcast_to(j >= 37, (T, S))),
        "no length": (dict(key_lengths=0), np.ones((T, S), bool)),
        "segments": (dict(segments=ids), ids[0][:, None] != ids[1]),
        "bool mask": (dict(mask=holes), ~holes),
        "bool mask for all rows": (dict(mask=holes[0]), np.broadcast_to(~holes[0], (T, S))),
        "minus infinity": (dict(mask=np.where(holes, bias, -np.inf)), ~holes),
        "mask and causal": (dict(mask=holes, causal=True), ~holes | (j > p)),
        "mask, softcap, sinks": (dict(mask=holes, softcap=2.0, sinks=np.zeros(2)), ~holes),
        "cosine": (dict(mask=holes, scale="cosine"), ~holes),
        "alibi": (dict(mask=holes, alibi=True, causal=True), ~holes | (j > p)),
        "dropout": (dict(mask=holes, dropout=0.5, seed=1), ~holes),
    }


HIDERS = hiders()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", HIDERS)
def test_poison_that_no_row_sees_changes_no_bit(isa: str, name: str, dtype: str) -> None:
    options, hidden = HIDERS[name]
    nobody = hidden.all(0)
    assert nobody.any()
    q, k, v = qkv((1, 2), T, S, D=9, E=6, dtype=dtype)
    k[..., nobody, :] = v[..., nobody, :] = 0
    clean = state_bits(q, k, v, **options)
    for poison in POISON:
        for spoiled in ("k", "v", "kv"):
            bad_k, bad_v = k.copy(), v.copy()
            if "k" in spoiled:
                bad_k[..., nobody, :] = poison
            if "v" in spoiled:
                bad_v[..., nobody, :] = poison
            for a, b in zip(clean, state_bits(q, bad_k, bad_v, **options), strict=True):
                same_bits(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", HIDERS)
def test_poison_that_some_rows_see_stays_with_them(isa: str, name: str, dtype: str) -> None:
    options, hidden = HIDERS[name]
    q, k, v = qkv((1, 2), T, S, D=9, E=6, dtype=dtype)
    clean, truth = state_bits(q, k, v, **options), reference.attention(q, k, v, **options)
    for j in (0, 7, 36, 38, 66, 70, S - 1):
        blind = hidden[:, j]
        for poison, into in itertools.product(POISON, ("k", "v")):
            bad_k, bad_v = k.copy(), v.copy()
            (bad_k if into == "k" else bad_v)[..., j, 2] = poison
            found = state_bits(q, bad_k, bad_v, **options)
            for a, b in zip(clean, found, strict=True):
                same_bits(a[..., blind, :], b[..., blind, :])
            out = found[0][..., ~blind, :].astype(float)
            if into == "v" and "dropout" not in options:
                assert not np.isfinite(out[..., 2]).any()
                # Its other columns stay right, but not bit for bit: that row has changed.
                others = [0, 1, 3, 4, 5]
                check_output(found[0][..., others], truth[..., others], magnitude(v))
            if into == "k" and np.isnan(poison):
                assert np.isnan(out).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_poison_in_the_bias_of_a_hidden_key(isa: str, dtype: str) -> None:
    q, k, v = qkv((1, 2), T, S, D=8, dtype=dtype)
    bias = np.random.default_rng(0).standard_normal((T, S)).astype("f4")
    clean = state_bits(q, k, v, mask=bias, causal=True, key_lengths=70)
    p = S - T + np.arange(T)[:, None]
    hidden = (np.arange(S) > p) | (np.arange(S) >= 70)
    for poison in POISON:
        bad = np.where(hidden, np.float32(poison), bias)
        for a, b in zip(clean, state_bits(q, k, v, mask=bad, causal=True, key_lengths=70), strict=True):
            same_bits(a, b)


# ---- visible NaN and inf (pytorch#141128: swallowed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "S"), [(1, 1), (7, 5), (6, 16), (13, 33), (97, 130)])
def test_a_visible_nan_gives_nan_in_its_rows_only(isa: str, T: int, S: int, dtype: str) -> None:
    q, k, v = qkv((2, 4), T, S, D=8, groups=2, dtype=dtype)
    p = S - T + np.arange(T)
    for options in (dict(causal=True), dict(causal=True, softcap=3.0, sinks=np.zeros(4))):
        clean, truth = lh.observe(q, k, v, **options), reference.attention(q, k, v, **options)
        for i in {0, T // 2, T - 1}:
            bad = q.copy()
            bad[1, 2, i, 3] = np.nan
            expect_nan(clean, lh.observe(bad, k, v, **options), (1, [2], p >= 0, np.arange(T) == i))
            out = lh.attention(bad, k, v, **options)
            same_bits(out, lh.observe(bad, k, v, **options).output)
        for j in {0, S // 2, S - 1}:
            bad = k.copy()
            bad[1, 1, j, 0] = np.nan
            expect_nan(clean, lh.observe(q, bad, v, **options), (1, [2, 3], p >= j, True))
            bad = v.copy()
            bad[0, 1, j, 4] = np.nan
            out = lh.attention(q, k, bad, **options)
            wanted = np.zeros(out.shape, bool)
            wanted[0, 2:, :, 4] = p >= j
            check_output(out, np.where(wanted, np.nan, truth), magnitude(v))
            blind = ~wanted.any(-1)
            same_bits(out[blind], clean.output[blind])


def expect_nan(clean: lh.Observation, seen: lh.Observation, where: tuple[Any, ...]) -> None:
    b, heads, rows, more = where
    sick = np.zeros(clean.rows.count.shape, bool)
    for h in heads:
        sick[b, h] = rows & more
    out = seen.output.astype(float)
    np.testing.assert_array_equal(np.isnan(out), np.broadcast_to(sick[..., None], out.shape))
    same_bits(seen.output[~sick], clean.output[~sick])
    np.testing.assert_array_equal(np.isnan(seen.logsumexp), sick)
    same_bits(seen.logsumexp[~sick], clean.logsumexp[~sick])
    for field in ("entropy", "top1", "sum_p2", "max", "min", "mean"):
        assert np.isnan(getattr(seen.rows, field)[sick]).all(), field
    assert (seen.rows.argmax[sick] == -1).all()
    np.testing.assert_array_equal(seen.rows.count, clean.rows.count)
    np.testing.assert_array_equal(seen.rows.argmax[~sick], clean.rows.argmax[~sick])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_in_a_visible_bias(isa: str, dtype: str) -> None:
    q, k, v = qkv((1,), 9, 40, D=8, dtype=dtype)
    mask = np.zeros((9, 40), "f4")
    clean = lh.attention(q, k, v, mask=mask)
    mask[4, 21] = np.nan
    out = lh.attention(q, k, v, mask=mask)
    assert np.isnan(out[:, 4].astype(float)).all()
    rest = np.arange(9) != 4
    same_bits(out[:, rest], clean[:, rest])


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_a_dot_product_that_overflows(isa: str, dtype: str) -> None:
    q, k, v = qkv((1,), 11, 50, D=4, dtype=dtype)
    clean = lh.observe(q, k, v, scale=1.0)
    big = math.sqrt(float(np.finfo("f8" if dtype == "float64" else "f4").max)) * 4
    bad_q, bad_k = q.copy(), k.copy()
    bad_q[0, 5], bad_k[0, 33] = [big, 0, 0, 0], [big, 0, 0, 0]
    seen = lh.observe(bad_q, bad_k, v, scale=1.0)
    # Above: +inf makes this whole row undefined.
    assert np.isnan(seen.output[0, 5].astype(float)).all()
    # Below: -inf hides the key, by definition.
    bad_k[0, 33] = [-big, 0, 0, 0]
    seen = lh.observe(bad_q, bad_k, v, scale=1.0)
    hidden = lh.observe(bad_q, k, v, scale=1.0, mask=np.arange(50) != 33)
    same_bits(seen.output[0, 5], hidden.output[0, 5])
    assert seen.rows.count[0, 5] == 49
    same_bits(seen.state.sums[0, 5], hidden.state.sums[0, 5])
    # Rows whose products stay small are not affected by the row or the key that overflowed.
    seen = lh.observe(bad_q, k, v, scale=1.0)
    rest = np.arange(11) != 5
    same_bits(seen.output[:, rest], clean.output[:, rest])


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_softcap_bounds_even_infinity(dtype: str) -> None:
    q, k, v = qkv((1,), 6, 35, D=4, dtype=dtype)
    big = math.sqrt(float(np.finfo("f8" if dtype == "float64" else "f4").max)) * 4
    q[0, 2], k[0, 20], k[0, 21] = [big, 0, 0, 0], [big, 0, 0, 0], [-big, 0, 0, 0]
    options = dict(scale=1.0, softcap=4.0)
    agree(q, k, v, lambda: lh.attention(q, k, v, **options), **options)
    truth = reference.observe(q, k, v, **options)
    for _, seen in on_every_isa(lambda: lh.observe(q, k, v, **options)):
        check_rows(seen.rows, truth.rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinite_values_are_weighed_as_the_reference_does(dtype: str) -> None:
    q, k, v = qkv((2,), 15, 40, D=8, dtype=dtype)
    v[0, 3, 1], v[1, 39, 2], v[1, 0, 0], v[1, 20, 0] = np.inf, -np.inf, np.inf, -np.inf
    for options in (dict(causal=True), dict(dropout=0.5, seed=4)):
        agree(q, k, v, lambda o=options: lh.attention(q, k, v, **o), **options)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_infinite_queries_and_keys(dtype: str) -> None:
    q, k, v = qkv((2,), 15, 40, D=8, dtype=dtype)
    q[0, 3, 1], q[1, 4] = np.inf, -np.inf
    truth = reference.observe(q, k, v)
    for _, seen in on_every_isa(lambda: lh.observe(q, k, v)):
        np.testing.assert_array_equal(seen.rows.count, truth.rows.count)
        np.testing.assert_array_equal(seen.rows.argmax, truth.rows.argmax)
        np.testing.assert_array_equal(np.isnan(seen.logsumexp), np.isnan(truth.logsumexp))
        np.testing.assert_array_equal(np.isneginf(seen.logsumexp), np.isneginf(truth.logsumexp))
    assert truth.output is not None
    agree(q, k, v, lambda: lh.attention(q, k, v))


# ---- rows that see nothing (pytorch#103749, #127055; mlx#2608; onnxruntime#28904)

BLIND: dict[str, dict[str, Any]] = {
    "bool mask": dict(mask=np.zeros((6, 40), bool)),
    "bool mask for all": dict(mask=np.zeros((1, 1), bool)),
    "float mask": dict(mask=np.full((6, 40), -np.inf, "f4")),
    "causal": dict(causal=True, query_start=-6),
    "window left of all keys": dict(window=(3, 2), query_start=-20),
    "window right of all keys": dict(window=(0, None), query_start=40),
    "lengths": dict(key_lengths=0),
    "segments": dict(segments=(np.zeros(6, int), np.ones(40, int))),
    "two halves": dict(key_lengths=20, mask=np.arange(40) >= 20),
    "softcap": dict(key_lengths=0, softcap=2.0, alibi=True),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BLIND)
def test_a_row_that_sees_nothing(isa: str, name: str, dtype: str) -> None:
    q, k, v = qkv((2, 3), 6, 40, D=8, dtype=dtype)
    zero = np.zeros_like(q)
    seen = lh.observe(q, k, v, **BLIND[name])
    same_bits(seen.output, zero)
    same_bits(lh.attention(q, k, v, **BLIND[name]), zero)
    assert np.isneginf(seen.logsumexp).all()
    assert (seen.rows.count == 0).all()
    assert (seen.rows.argmax == -1).all()
    assert (seen.rows.entropy == 0).all()
    assert (seen.heads.empty_rows == 6).all()
    sinks = np.array([0.0, -700.0, 5000.0])
    seen = lh.observe(q, k, v, sinks=sinks, **BLIND[name])
    same_bits(seen.output, zero)
    same_bits(lh.attention(q, k, v, sinks=sinks, **BLIND[name]), zero)
    np.testing.assert_array_equal(seen.logsumexp, np.broadcast_to(sinks[:, None], (2, 3, 6)))
    assert (seen.rows.sink == 1).all()
    seen = lh.observe(q, k, v, sinks=np.full(3, -np.inf), **BLIND[name])
    same_bits(seen.output, zero)
    assert np.isneginf(seen.logsumexp).all()


def test_blind_rows_among_others() -> None:
    q, k, v = qkv((1, 2), 30, 70, D=8)
    mask = np.random.default_rng(0).random((30, 70)) < 0.5
    mask[[0, 5, 6, 7, 8, 9, 10, 11, 29]] = False
    agree(q, k, v, lambda: lh.attention(q, k, v, mask=mask), mask=mask)
    for _, out in on_every_isa(lambda: lh.attention(q, k, v, mask=mask)):
        assert (out[..., ~mask.any(-1), :] == 0).all()


def test_a_low_bias_is_not_hidden(isa: str) -> None:
    # A finite bias, however low, is a number: with all of them equal the weights are equal too.
    q, k, v, _ = from_logits(np.zeros((3, 20)))
    for low in (-1e4, -1e30, np.finfo("f4").min):
        mask = np.full((3, 20), low, "f4")
        seen = lh.observe(q, k, v, mask=mask)
        check_output(seen.output, np.broadcast_to(v.mean(0, dtype="f8"), (3, 3)), magnitude(v))
        assert (seen.rows.count == 20).all()
        assert (seen.rows.argmax == 0).all()


# ---- empty dimensions (pytorch#141218: SIGFPE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_combination_of_empty_dimensions(dtype: str) -> None:
    for B, H, T, S, D, E in itertools.product((0, 2), (0, 2), (0, 3), (0, 5), (0, 4), (0, 6)):
        q, k, v = qkv((B, H), T, S, D, E, dtype=dtype)
        for options in (
            {},
            dict(causal=True, sinks=np.zeros(H), key_lengths=np.zeros(B, int)),
            dict(mask=np.ones((B, H, T, S), bool), window=(1, 1), alibi=np.zeros(H)),
        ):
            truth = reference.observe(q, k, v, **options)
            assert truth.output is not None
            for _, seen in on_every_isa(lambda a=(q, k, v), o=options: lh.observe(*a, **o)):
                check_rows(seen.rows, truth.rows)
                assert seen.heads.rows.shape == (B, H)
            for path, out in on_every_isa(lambda a=(q, k, v), o=options: lh.attention(*a, **o)):
                assert out.dtype == kind(dtype)
                check_output(out, truth.output, magnitude(v), isa=path)


def test_no_width_means_equal_weights() -> None:
    q, k, v = qkv((2,), 4, 9, D=0, E=3)
    for path, out in on_every_isa(lambda: lh.attention(q, k, v)):
        wanted = np.broadcast_to(v.mean(-2, keepdims=True, dtype="f8"), out.shape)
        check_output(out, wanted, magnitude(v), isa=path)


# ---- tails, magnitudes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [None, 60.0])
def test_ragged_tails_hold_no_phantom_keys(softcap: float | None, dtype: str) -> None:
    # All logits are far below zero: one padded key with logit 0 would take the whole weight.
    for S in (1, 2, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 97, 255, 257, 513):
        q, k, v = np.ones((7, 2)), np.full((S, 2), -20.0), np.full((S, 3), 5.0)
        k[:, 0] -= np.arange(S) % 3
        q, k, v = (x.astype(kind(dtype)) for x in (q, k, v))
        truth = reference.observe(q, k, v, scale=1.0, softcap=softcap)
        assert magnitude(truth.rows.max) > 30
        for path, seen in on_every_isa(lambda a=(q, k, v): lh.observe(*a, scale=1.0, softcap=softcap)):
            check_rows(seen.rows, truth.rows)
            check_output(seen.output, np.full((7, 3), 5.0), 5.0, M=40, isa=path)


@pytest.mark.parametrize("size", [1e-30, 1e-4, 1.0, 1e4, 1e15])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_scores_of_every_size(size: float, dtype: str) -> None:
    q, k, v = qkv((2,), 9, 45, D=8, dtype=dtype)
    q = (q.astype("f8") * size).astype(kind(dtype))
    agree(q, k, v, lambda: lh.attention(q, k, v))


@pytest.mark.parametrize("size", ["least", 1e-30, 1e-4, 1e15, "largest"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_cosines_do_not_depend_on_size(size: Any, dtype: str) -> None:
    q, k, v = qkv((2,), 9, 45, D=8, dtype=dtype)
    limits = np.finfo("f8" if dtype == "float64" else "f4")
    size = {"least": limits.tiny * 16, "largest": limits.max / 16}.get(size, size)
    q, k = ((x.astype("f8") * size).astype(kind(dtype)) for x in (q, k))
    agree(q, k, v, lambda: lh.attention(q, k, v, scale="cosine"), scale="cosine")


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_softcaps_of_every_size(dtype: str) -> None:
    q, k, v = qkv((2,), 9, 45, D=8, dtype=dtype)
    for cap in (1.2e-38, 1e-30, 1e-3, 0.7, 1.0, 1e3, 1e10, 1e30, 3e38):
        agree(q, k, v, lambda c=cap: lh.attention(q, k, v, softcap=c), softcap=cap)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_every_size(dtype: str) -> None:
    q, k, v = qkv((2,), 9, 45, D=8, dtype=dtype)
    top = float(np.finfo("f2" if dtype == "float16" else "f4").max)
    for largest in (top / 8, 1.0, 1e-3):
        big = (v.astype("f8") / magnitude(v) * largest).astype(kind(dtype))
        agree(q, k, big, lambda x=big: lh.attention(q, k, x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_subnormal_numbers_are_numbers(dtype: str) -> None:
    least = {"float32": 2.0**-149, "float64": 2.0**-1074, "float16": 2.0**-24}
    step = least.get(dtype, 2.0**-133)
    counts = np.random.default_rng(0).integers(-100, 100, (40, 3))
    v = (counts * step).astype(kind(dtype))
    assert (v != 0).mean() > 0.9
    q, k, _ = qkv((), 13, 40, D=4, dtype=dtype)  # fewer rows are read in place, and never multiplied in pairs
    # One visible key: the output is its value, bit for bit. (Products in pairs treat it as zero.)
    for name, out in on_every_isa(lambda: lh.attention(q, k[:1], v[:1])):
        if dtype == "bfloat16" and name == IN_PAIRS:
            assert (out == 0).all()
        else:
            same_bits(out, np.repeat(v[:1], 13, axis=0))
    truth = reference.attention(q, k, v)
    for name, out in on_every_isa(lambda: lh.attention(q, k, v)):
        if dtype == "bfloat16" and name == IN_PAIRS:
            assert (out == 0).all()
        else:  # Sums of subnormals round to whole steps, 40 times at worst.
            assert np.abs(out.astype("f8") - truth).max() <= 21 * step
    # Subnormal logits are logits near zero.
    tiny_q, tiny_k = np.full_like(q, step), np.full_like(k, 1)
    agree(tiny_q, tiny_k, k, lambda: lh.attention(tiny_q, tiny_k, k))


def test_far_weights_vanish_and_do_not_turn_subnormal(isa: str) -> None:
    for gap in (80.0, 87.0, 87.4, 88.0, 100.0, 103.0, 104.0, 1e4):
        q, k, v, mask = from_logits([[0.0, -gap] * 20])
        v[:] = np.where(np.arange(40) % 2, 1.0, 0.0)[:, None]
        out = lh.attention(q, k, v, mask=mask)
        np.testing.assert_allclose(out, math.exp(-gap), rtol=1e-4, atol=2.0**-125)
        assert ((out == 0) | (out >= np.finfo("f4").tiny)).all()


# ---- index widths (pytorch#162588: a silent step at 65536; #150054)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("lead", "T", "S"),
    [((1,), 65_600, 3), ((1,), 2, 65_600), ((65_600, 1), 1, 2), ((1, 65_600), 1, 2)],
    ids=["queries", "keys", "batch", "heads"],
)
def test_more_than_16_bits_of_everything(lead: tuple[int, ...], T: int, S: int, dtype: str) -> None:
    q, k, v = qkv(lead, T, S, D=2, E=1, dtype=dtype)
    agree(q, k, v, lambda: lh.attention(q, k, v, causal=True), causal=True)


def test_more_than_16_bits_of_heads_in_one_group() -> None:
    q, k, v = qkv((65_600,), 1, 3, D=2, E=1, groups=1)
    agree(q, k, v, lambda: lh.attention(q, k, v))


def far_apart(x: Array, axis: int, step: int, room: mmap.mmap) -> Array:
    """A copy of x in `room` with `step` elements between neighbours along one axis."""
    strides = list(np.ascontiguousarray(x).strides)
    strides[axis] = step * x.itemsize
    offset = max(0, -(x.shape[axis] - 1) * strides[axis])
    view = np.ndarray(x.shape, x.dtype, room, offset, strides)
    view[:] = x
    return view


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sign", [1, -1])
def test_more_than_31_bits_of_stride(isa: str, dtype: str, sign: int) -> None:
    # Sparse memory: more than eight gigabytes of addresses, of which a few pages are used.
    step = sign * (2**30 + 3)
    room = mmap.mmap(-1, (3 * 2**30 + 2**16) * kind(dtype).itemsize, flags=SPARSE)
    for axis in range(4):
        lead = [2, 2, 4, 4]
        lead[axis] = 4
        B, H, n, D = lead
        q, k, v = qkv((B, H), n, n, D, D, dtype=dtype, seed=axis)
        whole = lh.attention(q, k, v, causal=True)
        for which in range(3):
            given = [q, k, v]
            given[which] = far_apart(given[which], axis, step, room)
            same_bits(given[which].copy(), (q, k, v)[which])
            same_bits(lh.attention(*given, causal=True), whole)
        out = far_apart(np.zeros_like(whole), axis, step, room)
        lh.attention(q, k, v, causal=True, out=out)
        same_bits(out.copy(order="C"), whole)
        bias = np.random.default_rng(0).standard_normal((B, H, n, n)).astype(kind(dtype))
        wide = far_apart(bias, axis, step, room)
        same_bits(lh.attention(q, k, v, mask=wide), lh.attention(q, k, v, mask=bias))
    del given, out, wide
    gc.collect()
    room.close()


SPARSE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_than_31_bits_of_elements_in_a_mask(isa: str, dtype: str) -> None:
    # By broadcasting; key_lengths leave few of them to read.
    T, S = 2**12, 2**20
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((n, 2)).astype(kind(dtype)) for n in (T, 1, 1))
    k, v = np.broadcast_to(k, (S, 2)), np.broadcast_to(v, (S, 2))
    row = rng.standard_normal(S).astype(kind(dtype))
    mask = np.broadcast_to(row, (T, S))
    assert mask.size > 2**31
    out = lh.attention(q, k, v, mask=mask, key_lengths=8)
    truth = reference.attention(q, k[:8], v[:8], mask=row[:8])
    check_output(out, truth, magnitude(v))


def test_positions_beyond_32_bits() -> None:
    q, k, v = qkv((1, 2), 12, 30, D=8)
    for start in (2**31 - 5, 2**33, -(2**33), 2**60):
        for options in (dict(causal=True), dict(window=(2**34, 2**34))):
            agree(
                q,
                k,
                v,
                lambda o=options, s=start: lh.attention(q, k, v, query_start=s, **o),
                query_start=start,
                **options,
            )


@pytest.mark.parametrize("start", [2**61, 2**61 - 1, -(2**61), -(2**61) + 1])
def test_positions_at_the_end_of_what_is_accepted(start: int) -> None:
    q, k, v = qkv((1, 2), 12, 30, D=8)
    for options in (
        {},
        dict(causal=True),
        dict(window=(2**62, None)),
        dict(window=(None, 2**62)),
        dict(window=(2**62 - 1, 2**62 - 1), causal=True),
        dict(window=(3, 3)),
    ):
        given = dict(options, query_start=start)
        agree(q, k, v, lambda o=given: lh.attention(q, k, v, **o), **given)


# ---- foreign memory (pytorch#46741: segfault on a read-only map; dlpack#51; numpy#19083)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_a_file_mapped_read_only(isa: str, dtype: str, tmp_path: Any) -> None:
    arrays = qkv((2, 2), 9, 40, D=8, dtype=dtype)
    mapped = []
    for name, x in zip("qkv", arrays, strict=True):
        np.save(tmp_path / f"{name}.npy", x)
        mapped.append(np.load(tmp_path / f"{name}.npy", mmap_mode="r"))
    mask = np.random.default_rng(0).random((9, 40)) < 0.5
    np.save(tmp_path / "mask.npy", mask)
    given = np.load(tmp_path / "mask.npy", mmap_mode="r")
    assert not mapped[0].flags.writeable
    same_bits(lh.attention(*mapped, mask=given), lh.attention(*arrays, mask=mask))


def test_a_file_mapped_read_only_is_no_place_for_a_result(tmp_path: Any) -> None:
    q, k, v = qkv((2,), 4, 5)
    np.save(tmp_path / "out.npy", q)
    with pytest.raises(lh.LevelheadError, match="out"):
        lh.attention(q, k, v, out=np.load(tmp_path / "out.npy", mmap_mode="r"))


class Exporter:
    """Exports torch's memory by DLPack only, a new capsule each time."""

    def __init__(self, x: Array) -> None:
        self._tensor = torch.from_numpy(x.copy())

    def __dlpack__(self, **asked: Any) -> Any:
        return self._tensor.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        device = self._tensor.__dlpack_device__()
        return int(device[0]), int(device[1])


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_capsules_twice_and_after_their_exporter(isa: str, dtype: str) -> None:
    q, k, v = qkv((2, 2), 9, 40, D=8, dtype=dtype)
    whole = lh.attention(q, k, v)
    given = [Exporter(x) for x in (q, k, v)]
    first, second = lh.attention(*given), lh.attention(*given)
    seen = lh.observe(*given)
    del given
    gc.collect()
    for result in (first, second, seen.output):
        same_bits(np.asarray(result), whole)


@pytest.mark.parametrize("make", [torch.from_numpy, Exporter])
def test_results_outlive_their_inputs(make: Callable[[Array], Any]) -> None:
    q, k, v = qkv((2, 2), 9, 40, D=8)
    whole = lh.attention(q, k, v)
    results = [lh.attention(make(q.copy()), make(k.copy()), make(v.copy())) for _ in range(50)]
    gc.collect()
    for result in results:
        same_bits(np.asarray(result), whole)


def test_a_failed_call_gives_everything_back() -> None:
    exporter = Exporter(np.ones((2, 3, 4), "f4"))
    for _ in range(20):
        with pytest.raises(lh.LevelheadError):
            lh.attention(exporter, exporter, Exporter(np.ones((2, 9, 4), "f4")))
    same_bits(np.asarray(lh.attention(exporter, exporter, exporter)), np.ones((2, 3, 4), "f4"))
