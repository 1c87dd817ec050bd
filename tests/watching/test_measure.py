"""Statistics of a described call: `measure.tallied` against `lh.reference`, by the core and by plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from levelhead import reference
from levelhead.runs import tally
from levelhead.watching import measure
from levelhead.watching.measure import Call, call_of

B, H, G, T, D = 2, 4, 2, 96, 8
PATHS = pytest.mark.parametrize("by_torch", [False, True], ids=["core", "torch"])
DOCUMENT = torch.tensor([[0] * 30 + [1] * 50 + [2] * 16, [0] * 64 + [1] * 32])


def inputs(T: int = T, S: int | None = None, seed: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(B, H, T, D), torch.randn(B, G, T if S is None else S, D)


def measured(call: Call, by_torch: bool, sample: int | None = None) -> dict[str, Any]:
    return tally.values(tally.read(measure.tallied(call, by_torch=by_torch, sample=sample).double().numpy()))


def defined(call: Call, used: Tensor | None = None, **options: Any) -> dict[str, Any]:
    """The same by `reference`, from float64; `used` (B, T): the rows that count."""
    q, k = (x.double().numpy() for x in (call.q, call.k))
    rows = reference.observe(q, k, query_start=0, scale=call.scale.numpy(), **options).rows
    fields = {name: np.asarray(getattr(rows, name)) for name in (*measure._ROW_FIELDS, "count", "argmax")}
    if used is not None:
        fields["exists"] = np.broadcast_to(used[:, None].numpy(), fields["count"].shape)
    heads = tally.of_rows(fields)
    return tally.values(tally.read(heads))


def same(found: dict[str, Any], truth: dict[str, Any], but: tuple[str, ...] = ()) -> None:
    skipped = (*but, "q_rms", "k_rms", "dq_norm", "dk_norm", "dv_norm")
    for name in truth.keys() - set(skipped):
        np.testing.assert_allclose(found[name], truth[name], rtol=2e-5, atol=2e-6, err_msg=name)


def _document(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (DOCUMENT[b, q] == DOCUMENT[b, k]) & (q >= k)


@PATHS
@pytest.mark.parametrize("blocks", [None, 32, (16, 48)], ids=str)
def test_a_mask_given_as_a_function(by_torch: bool, blocks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_MASK_AT_A_TIME", 20 * B * T)  # 20 rows at a time
    q, k = inputs()
    dense = (DOCUMENT[:, None, :, None] == DOCUMENT[:, None, None, :]) & torch.ones(T, T).tril().bool()
    mod: Any = _document
    if blocks is not None:
        mod = create_block_mask(_document, B, None, T, T, device="cpu", BLOCK_SIZE=blocks)
        # What is visible as a whole is not asked: a block mask is its blocks, and its function elsewhere.
        assert mod.full_kv_num_blocks.sum() > 0
    call = replace(call_of(q, k, 0.3), mask_mod=mod)
    same(measured(call, by_torch), defined(call, mask=dense.numpy()))
    some = measured(call, by_torch, sample=7)
    assert (some["rows"] == 7 * B).all()


@PATHS
def test_a_mask_function_by_head_beside_a_mask_and_a_window(by_torch: bool) -> None:
    q, k = inputs()
    bias = torch.randn(1, H, T, T)
    call = call_of(q, k, 0.3, mask=bias, left=20, right=3)
    call = replace(call, mask_mod=lambda b, h, q, k: (q + k + h) % 3 != 0)
    i, h = torch.arange(T), torch.arange(H)
    shown = (i[:, None] + i + h[:, None, None]) % 3 != 0
    mask = torch.where(shown, bias, -torch.inf).double().numpy()
    same(measured(call, by_torch), defined(call, mask=mask, window=(20, 3)))


@PATHS
def test_a_score_function_follows_the_scale(by_torch: bool) -> None:
    q, k = inputs()
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0])
    call = replace(
        call_of(q, k, 0.3, causal=True), score_mod=lambda score, b, h, q, k: score - slopes[h] * (q - k).abs()
    )
    same(measured(call, by_torch), defined(call, causal=True, alibi=slopes.numpy()))


@PATHS
def test_rows_that_the_model_does_not_use_count_nowhere(by_torch: bool) -> None:
    q, k = inputs()
    used = torch.ones(B, T, dtype=torch.bool)
    used[0, 40:], used[1, ::3] = False, False
    q[0, :, 50:] = 1e6
    q[1, :, 3] = torch.nan
    call = replace(call_of(q, k, 0.3, causal=True), rows=used)
    found = measured(call, by_torch)
    same(found, defined(call, used, causal=True))
    assert found["nan_rows"].sum() == 0 and (found["rows"] == used.sum().item()).all()
