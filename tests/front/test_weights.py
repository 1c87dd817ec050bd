"""`observe(weights=)`: weights of chosen rows against the reference, in every dtype and family, and their gradients."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import levelhead as lh
from levelhead import chosen_weights, reference
from levelhead.call.halves import as_bfloat16
from levelhead.call.options import Scoring
from levelhead.torch.weights import weights
from support import qkv

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal, window": {"causal": True, "window": (4, None)},
    "bias": {"mask": np.random.default_rng(0).normal(size=(4, 9, 11)).astype(np.float32)},
    "bool mask": {"mask": np.random.default_rng(0).random((9, 11)) < 0.5},
    "sinks, softcap": {"sinks": np.array([0.0, 2.0, -1.0, 1.0]), "softcap": 2.0},
    "ALiBi, lengths": {"alibi": True, "key_lengths": [11, 4], "query_lengths": [9, 5]},
    "segments": {"segments": (np.arange(18).reshape(2, 9) // 5, np.arange(22).reshape(2, 11) // 4)},
    "cosine": {"scale": "cosine"},
    "log-n": {"scale": "log-n", "causal": True},
}


def truth(q: Any, k: Any, options: dict[str, Any]) -> Any:
    s = reference.logits(q, k, **options)
    lse = reference.observe(q, k, **options).logsumexp[..., None]
    with np.errstate(invalid="ignore"):
        return np.where(s == -np.inf, 0.0, np.exp(s - lse))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_weights_of_all_rows(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen_weights, "_AT_A_TIME", 300)  # a few rows at a time
    q, k, v = qkv((2, 4), 9, 11, 8, groups=2, dtype=dtype)
    expected = truth(q, k, OPTIONS[name])
    seen = lh.observe(q, k, v, weights=True, **OPTIONS[name])
    assert seen.weights.dtype == q.dtype and seen.weights.shape == (2, 4, 9, 11)
    close = {"float64": 1e-12, "float32": 2e-6, "float16": 2e-3, "bfloat16": 1e-2}[dtype]
    np.testing.assert_allclose(seen.weights.astype(np.float64), expected, rtol=close, atol=1e-7)
    assert ((seen.weights == 0) >= (expected == 0)).all()  # hidden keys exactly
    np.testing.assert_array_equal(seen.output, lh.attention(q, k, v, **OPTIONS[name]))


@pytest.mark.parametrize(
    ("rows", "index"),
    [(3, [3]), (-1, [8]), ([0, 7, 2], [0, 7, 2]), (slice(2, 8, 3), [2, 5]), (range(2), [0, 1]), ("all", range(9))],
)
@pytest.mark.parametrize("gradients", [False, True])
def test_chosen_rows(rows: Any, index: Any, gradients: bool) -> None:
    q, k, _ = (torch.from_numpy(x) for x in qkv((2, 4), 9, 11, 8))
    expected = truth(q.numpy(), k.numpy(), {"causal": True})[:, :, list(index)]
    seen = lh.observe(q.requires_grad_(gradients), k, causal=True, weights=rows)
    assert isinstance(seen.weights, torch.Tensor) and seen.weights.requires_grad is gradients
    np.testing.assert_allclose(seen.weights.detach().numpy(), expected, rtol=1e-5, atol=1e-7)


def test_one_head_without_its_axis() -> None:
    q, k, _ = qkv((), 5, 7, 8)
    np.testing.assert_allclose(lh.observe(q, k, weights=True).weights, truth(q, k, {}), rtol=1e-5)
    tensors = torch.from_numpy(q).requires_grad_(), torch.from_numpy(k)
    assert lh.observe(*tensors, weights=[1, 2]).weights.shape == (2, 7)


def test_gradients_are_those_of_eager_attention() -> None:
    q, k, _ = (torch.from_numpy(x).double().requires_grad_() for x in qkv((2, 4), 6, 6, 8, groups=2))
    bias = torch.randn(4, 6, 6, dtype=torch.float64, requires_grad=True)
    sinks = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    scoring = Scoring(torch.full((4,), 0.4, dtype=torch.float64), mask=bias, sinks=sinks, causal=True)
    scores = q @ k.repeat_interleave(2, 1).mT * 0.4 + bias
    scores = scores.masked_fill(~torch.ones(6, 6).tril().bool(), -torch.inf)
    eager = torch.cat([scores, sinks[:, None, None].expand(2, 4, 6, 1)], -1).softmax(-1)[..., :-1]
    factor = torch.randn_like(eager)
    expected = torch.autograd.grad((eager * factor).sum(), (q, k, bias, sinks))
    found = torch.autograd.grad((weights(q, k, scoring) * factor).sum(), (q, k, bias, sinks))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("rows", [9, -10, [1, 99], 1.5, "some", [[1]], False, object()])
def test_rows_that_are_none(rows: Any) -> None:
    q, k, _ = qkv((2, 4), 9, 11, 8)
    with pytest.raises(lh.LevelheadError, match="weights"):
        lh.observe(q, k, weights=rows)


def test_too_many_weights_are_refused_with_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    q = np.broadcast_to(np.zeros(1, np.float32), (64, 32, 4096, 8))
    with pytest.raises(lh.LevelheadError, match="128.0 GiB"):
        lh.observe(q, q, weights=True)


def test_weights_must_be_asked_for() -> None:
    q, k, _ = qkv((2, 4), 9, 11, 8)
    with pytest.raises(lh.LevelheadError, match="weights=rows"):
        lh.observe(q, k).weights  # noqa: B018


def test_bfloat16_is_rounded_to_nearest() -> None:
    x = np.random.default_rng(1).random((4, 9), np.float32)
    bits = as_bfloat16(x)
    np.testing.assert_array_equal(bits.view(ml_dtypes.bfloat16), x.astype(ml_dtypes.bfloat16))
