"""Queries that do not exist: their rows are 0, count in no statistic, get and give no gradient, cost nothing."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch

import levelhead as lh
from levelhead import reference, stats
from support import DTYPES, Array, isa, kind, qkv, same_bits

__all__ = ["isa"]  # a fixture: pytest finds it by name

B, H, G, T, S, D, E = 3, 4, 2, 70, 90, 16, 8
LENGTHS = np.array([0, 33, T])
EXISTS = (np.arange(T) < LENGTHS[:, None])[:, None, :]  # (B, 1, T)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(window=(20, 3)),
    "sinks": dict(sinks=np.linspace(-1, 2, H)),
    "softcap and alibi": dict(softcap=2.0, alibi=True),
    "mask": dict(mask=np.random.default_rng(1).random((B, 1, T, S)) < 0.6),
    "bias": dict(mask=np.random.default_rng(1).standard_normal((H, T, S)).astype("f4")),
    "segments": dict(segments=(np.arange(T) // 20, np.arange(S) // 25)),
    "dropout": dict(dropout=0.4, seed=3),
    "cosine": dict(scale="cosine"),
    "log-n": dict(scale="log-n", causal=True),
}


def spoiled(x: Array) -> Array:
    """x with NaN and inf in the rows that do not exist."""
    wild = np.where(np.arange(x.shape[-1]) % 2, np.nan, np.inf).astype(x.dtype)
    return np.where(EXISTS[..., None], x, wild)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_rows_that_exist_keep_their_bits_and_the_others_are_nothing(name: str, dtype: str, isa: str) -> None:
    q, k, v = qkv((B, H), T, S, D, E, groups=G, dtype=dtype)
    whole = lh.observe(q, k, v, **OPTIONS[name])
    part = lh.observe(spoiled(q), k, v, query_lengths=LENGTHS, **OPTIONS[name])
    exists = np.broadcast_to(EXISTS, (B, H, T))
    same_bits(part.output[exists], whole.output[exists])
    same_bits(part.output, lh.attention(spoiled(q), k, v, query_lengths=LENGTHS, **OPTIONS[name]))
    assert not part.output[~exists].astype(np.float64).any()
    for field in stats.Rows.__dataclass_fields__:
        same_bits(getattr(part.rows, field)[exists], getattr(whole.rows, field)[exists])
    assert (part.logsumexp[~exists] == -np.inf).all()
    assert not part.rows.count[~exists].any() and not part.rows.sink[~exists].any()


@pytest.mark.parametrize("name", OPTIONS)
def test_heads_count_rows_that_exist_and_no_others(name: str) -> None:
    q, k, v = qkv((B, H), T, S, D, E, groups=G)
    seen = lh.observe(spoiled(q), k, v, query_lengths=LENGTHS, **OPTIONS[name]).heads
    assert (seen.rows + seen.empty_rows == LENGTHS[:, None]).all()
    alone = lh.observe(q, k, v, **OPTIONS[name]).rows
    for b, length in enumerate(LENGTHS):
        rows = stats.Rows(**{x: getattr(alone, x)[b, :, :length] for x in stats.Rows.__dataclass_fields__})
        truth = stats.heads(rows)
        for field in stats.Heads.__dataclass_fields__:
            np.testing.assert_allclose(getattr(seen, field)[b], getattr(truth, field), rtol=1e-12, err_msg=field)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("name", OPTIONS)
def test_no_gradient_leaves_or_reaches_rows_that_do_not_exist(name: str, dtype: str, isa: str) -> None:
    options = dict(OPTIONS[name])
    if dtype == "float64" and "mask" in options and options["mask"].dtype != bool:
        options["mask"] = options["mask"].astype(np.float64)
    wrt = ["q", "k", "v", "scale"] + ["sinks"] * (name == "sinks") + ["mask"] * (name == "bias")
    q, k, v = qkv((B, H), T, S, D, E, groups=G, dtype=dtype)
    rng = np.random.default_rng(2)
    dout = rng.standard_normal((B, H, T, E)).astype(kind(dtype))
    wide = np.float64 if dtype == "float64" else np.float32
    dlse = rng.standard_normal((B, H, T)).astype(wide)
    quiet = np.broadcast_to(EXISTS, dlse.shape)
    options["query_lengths"] = LENGTHS
    seen = lh.observe(q, k, v, **options)

    def backward(q: Array, dout: Array, dlse: Array) -> tuple[Array, ...]:
        out, lse = seen.output, seen.logsumexp
        found: tuple[Array, ...] = lh.attention_backward(dout, q, k, v, out, lse, dlogsumexp=dlse, wrt=wrt, **options)
        return found

    clean = backward(q, dout, dlse)
    wild = backward(spoiled(q), spoiled(dout), np.where(quiet, dlse, np.nan).astype(wide))
    for a, b in zip(clean, wild, strict=True):
        same_bits(np.asarray(a), np.asarray(b))
    assert not clean[0].astype(np.float64)[~quiet].any()
    if dtype == "float64":
        truth = reference.attention_backward(dout, q, k, v, dlse, **options)
        for key, x in zip(wrt, clean, strict=True):
            want = truth[key].sum() if key == "scale" else truth[key]
            np.testing.assert_allclose(x, want, rtol=1e-8, atol=1e-10, err_msg=key)


def test_tensors_that_require_gradients_get_none_beyond_the_length() -> None:
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in qkv((B, H), T, S, D, E, groups=G))
    out = lh.attention(q, k, v, query_lengths=LENGTHS, causal=True)
    assert isinstance(out, torch.Tensor)
    out.sum().backward()
    assert q.grad is not None and not q.grad[~torch.from_numpy(EXISTS).expand(B, H, T)].any()
    np.testing.assert_array_equal(
        out.detach().numpy(), lh.attention(*(x.detach().numpy() for x in (q, k, v)), query_lengths=LENGTHS, causal=True)
    )


def test_a_single_head_without_a_batch() -> None:
    q, k, v = qkv((), 9, 12, 4)
    out = lh.attention(q, k, v, query_lengths=4)
    same_bits(out[:4], lh.attention(q, k, v)[:4])
    assert not out[4:].any()
    assert lh.observe(q, k, query_lengths=4).heads.rows == 4


def test_merged_halves_must_agree_on_the_queries_that_exist() -> None:
    q, k, v = qkv((B, H), T, S, D, E, groups=G)
    whole = lh.observe(q, k, v, query_lengths=LENGTHS)
    halves = [
        lh.observe(q, k[:, :, part], v[:, :, part], query_lengths=LENGTHS) for part in (slice(0, 40), slice(40, S))
    ]
    merged = lh.merge(*halves)
    np.testing.assert_array_equal(merged.heads.rows, whole.heads.rows)
    np.testing.assert_allclose(merged.output, whole.output, atol=1e-6)
    with pytest.raises(lh.LevelheadError, match="queries that exist") as refusal:
        lh.merge(halves[0], lh.observe(q, k[:, :, 40:], v[:, :, 40:]))
    assert len(str(refusal.value)) < 300
    every = [lh.observe(q, k, v, query_lengths=T), lh.observe(q, k, v)]
    assert lh.merge(*every).heads.rows.tolist() == every[1].heads.rows.tolist()


def test_every_front_end_names_it() -> None:
    functions = (lh.attention, lh.observe, lh.attention_backward, lh.additive_attention, lh.explain)
    functions += (lh.distributed.attention, lh.distributed.observe, lh.MultiHeadAttention.__call__)
    for function in (*functions, lh.torch.MultiHeadAttention.forward):
        assert "query_lengths" in inspect.signature(function).parameters, function
        assert "query_lengths:" in (function.__doc__ or ""), function


def test_work_follows_the_queries_that_exist() -> None:
    """The whole call would take hours: two million queries of as many keys, of which four queries exist."""
    n = 2**21
    x = np.broadcast_to(qkv((1,), 1, 1, 4)[0], (1, n, 4))
    out = lh.attention(x, x, x, query_lengths=4)
    assert out[:, :4].any() and not out[:, 4:].any()
    assert lh.observe(x, x, query_lengths=4).heads.rows.tolist() == [4]
