"""`lh.preflight` of models in which nothing moves at first: projections and gates that start at zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import levelhead as lh
from levelhead.preflight_checks.result import Preflight
from watched import one_thread  # noqa: F401

H, D, T = 4, 8, 12


def wrong(result: Preflight) -> list[str]:
    return sorted({f.kind for f in result.findings if f.severity != "note"})


class Layer(nn.Module):
    def __init__(self, zero: str, *, causal: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(H * D, H * D, bias=False) for _ in range(4))
        self.causal, self.gate = causal, 1.0
        if zero == "projection":
            nn.init.zeros_(self.o_proj.weight)
        elif zero in ("gate", "small gate"):
            self.gate = nn.Parameter(torch.full((H * D,), 0.0 if zero == "gate" else 1e-6))
        elif zero == "number":
            self.gate = 0.0

    def forward(self, x: Tensor, keep: Tensor | None) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (H, D)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        seen = None if keep is None else keep.bool()[:, None, None]
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=self.causal and seen is None)
        return self.gate * self.o_proj(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, zero: str, *, causal: bool = False, reads_padding: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, H * D)
        self.layers = nn.ModuleList(Layer(zero, causal=causal) for _ in range(2))
        self.reads_padding = reads_padding

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x, attention_mask if self.reads_padding else None)
        return x


def batch(*, padded: bool = False) -> dict[str, Any]:
    keep = torch.ones(3, T, dtype=torch.long)
    keep[1, -4:] = 0
    ids = torch.randint(50, (3, T), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids} | ({"attention_mask": keep} if padded else {})


@pytest.mark.parametrize("zero", ["projection", "gate", "small gate"])
def test_a_missing_mask_behind_zeros_is_named(zero: str) -> None:
    assert wrong(lh.preflight(Model(zero), batch(), causal=True)) == ["not causal"]
    right = lh.preflight(Model(zero, causal=True), batch(), causal=True)
    assert wrong(right) == [] and right["causality"].verdict == "passed"
    assert "random numbers in 2 parameters of zeros (first: layers.0." in right["causality"].changed


def test_padding_that_is_seen_behind_zeros_is_named() -> None:
    assert wrong(lh.preflight(Model("projection", reads_padding=False), batch(padded=True))) == ["padding not masked"]
    right = lh.preflight(Model("projection"), batch(padded=True))
    assert wrong(right) == [] and right["padding independence"].verdict == "passed"


def test_nothing_passes_where_no_token_reaches_another() -> None:
    result = lh.preflight(Model("number", reads_padding=False), batch(padded=True), causal=True)
    for name in ("causality", "padding independence", "batch independence"):
        assert result[name].verdict == "not judged" and "do not depend on other tokens" in result[name].moved


def test_zeros_are_put_back() -> None:
    model = Model("projection", causal=True)
    weight = model.layers[0].o_proj.weight
    version, place = weight._version, weight.data_ptr()
    lh.preflight(model, batch())
    assert not bool(weight.any()) and (weight._version, weight.data_ptr()) == (version, place)


def test_zeros_are_put_back_after_an_exception() -> None:
    model = Model("projection")

    def fails(module: nn.Module, args: Any) -> None:
        if bool(model.layers[0].o_proj.weight.any()):
            raise KeyboardInterrupt

    model.register_forward_pre_hook(fails)
    with pytest.raises(KeyboardInterrupt):
        lh.preflight(model, batch())
    assert not bool(model.layers[0].o_proj.weight.any())
