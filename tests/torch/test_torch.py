"""The drop-in beyond its results: dropout, masks with causality, `patch`, errors.

Its results are compared with PyTorch's in test_sdpa.py.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import levelhead as lh
from levelhead.call.options import Scoring
from levelhead.torch import patch, scaled_dot_product_attention
from levelhead.torch.functorch import attend

ORIGINAL = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def tensors(
    *lead: int,
    T: int = 5,
    S: int = 7,
    D: int = 4,
    E: int = 3,
    G: int | None = None,
    dtype: torch.dtype = torch.float64,
    grad: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    kv = lead if G is None else (*lead[:-1], G)
    q, k, v = (torch.randn(*shape, dtype=dtype) for shape in ((*lead, T, D), (*kv, S, D), (*kv, S, E)))
    return q.requires_grad_(grad), k.requires_grad_(grad), v.requires_grad_(grad)


# ---- the drop-in


def test_grouped_queries() -> None:
    q, k, v = tensors(2, 6, G=2, grad=False)
    found = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(found, ORIGINAL(q, k, v, enable_gqa=True))
    with pytest.raises(RuntimeError, match="enable_gqa"):
        scaled_dot_product_attention(q, k, v)


def test_a_mask_and_causal_mean_both() -> None:
    q, k, v = tensors(2, 3, T=6, S=6, grad=False)
    mask = torch.rand(6, 6) < 0.7
    both = ORIGINAL(q, k, v, attn_mask=mask & torch.ones(6, 6, dtype=torch.bool).tril())
    found = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=True)
    torch.testing.assert_close(found, both)


def test_dropout_keeps_its_share_and_is_pytorchs_to_repeat() -> None:
    q, k = torch.zeros(1, 1, 64, 8), torch.zeros(1, 1, 512, 8)
    v = torch.eye(512)[None, None]
    torch.manual_seed(3)
    a = scaled_dot_product_attention(q, k, v, dropout_p=0.25)
    torch.manual_seed(3)
    b = scaled_dot_product_attention(q, k, v, dropout_p=0.25)
    c = scaled_dot_product_attention(q, k, v, dropout_p=0.25)
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    kept = a[0, 0] > 0
    assert abs(float(kept.double().mean()) - 0.75) < 0.02
    torch.testing.assert_close(a[0, 0][kept], torch.full((int(kept.sum()),), 1 / 512 / 0.75))
    assert not scaled_dot_product_attention(q, k, v, dropout_p=1.0).any()


def test_rows_that_see_nothing_are_zero() -> None:
    q, k, v = tensors(2, 3)
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2] = False
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert not out[:, :, 2].any()
    out.sum().backward()
    assert q.grad is not None
    assert torch.isfinite(q.grad).all()


# ---- patch


def test_patch_swaps_and_restores() -> None:
    importer = types.ModuleType("importer")
    importer.sdpa = ORIGINAL  # type: ignore[attr-defined]
    sys.modules["importer"] = importer
    try:
        with patch():
            assert F.scaled_dot_product_attention is scaled_dot_product_attention
            assert importer.sdpa is scaled_dot_product_attention
            with patch():
                pass
            assert F.scaled_dot_product_attention is scaled_dot_product_attention
        assert F.scaled_dot_product_attention is ORIGINAL
        assert importer.sdpa is ORIGINAL
        with pytest.raises(KeyError), patch():
            raise KeyError
        assert F.scaled_dot_product_attention is ORIGINAL
        holding = patch()
        assert F.scaled_dot_product_attention is scaled_dot_product_attention
        holding.undo()
        holding.undo()
        assert F.scaled_dot_product_attention is ORIGINAL
    finally:
        del sys.modules["importer"]


def test_a_patched_encoder_gives_the_same() -> None:
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    x = torch.randn(2, 9, 32)
    want = layer(x)
    with patch():
        found = layer(x)
    assert not torch.equal(found, want)  # levelhead did compute it
    torch.testing.assert_close(found, want)


# ---- mistakes

ONES = torch.ones(2, 3, 4)


@pytest.mark.parametrize(
    ("given", "options", "says"),
    [
        ((ONES, ONES.double(), ONES), {}, "one dtype of"),
        ((ONES.int(), ONES.int(), ONES.int()), {}, "one dtype of"),
        ((ONES[0, 0], ONES, ONES), {}, "at least 2 dimensions"),
        ((ONES, ONES[..., :2], ONES), {}, "key as wide as query"),
        ((ONES, ONES, ONES[:, :2]), {}, "as many values as keys"),
        ((ONES, torch.ones(5, 3, 4), torch.ones(5, 3, 4)), {}, "broadcast"),
        ((ONES, ONES, ONES), {"attn_mask": torch.ones(2, 2)}, "broadcasts to"),
        ((ONES, ONES, ONES), {"attn_mask": torch.ones(3, 3).long()}, "attn_mask: expected bool"),
        ((ONES, ONES, ONES), {"dropout_p": 1.5}, "a probability"),
        ((ONES.to_sparse(), ONES, ONES), {}, "a dense tensor"),
        ((torch.nested.nested_tensor([ONES, ONES]),) * 3, {}, "a dense tensor"),
    ],
)
def test_mistakes_are_runtime_errors(given: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(RuntimeError, match=says) as caught:
        scaled_dot_product_attention(*given, **options)
    assert isinstance(caught.value, lh.LevelheadError)


def test_the_logsumexp_of_the_operator() -> None:
    q, k, v = tensors(2, 3, grad=False)
    _, found = attend(q, k, v, Scoring(scale=torch.full((3,), 0.5, dtype=torch.float64)))
    torch.testing.assert_close(found, (q @ k.mT * 0.5).logsumexp(-1))
