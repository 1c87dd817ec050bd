"""Modules of transformers that form their softmax by hand: deep=True knows their q and k, and so their scale."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM

import levelhead as lh

_WIDTH = 8


def _watched(deep: bool | None, factor: float = 1 / math.sqrt(_WIDTH)) -> lh.Watch:
    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(vocab_size=32, hidden_size=4 * _WIDTH, n_layer=1, n_head=4)).eval()
    model.transformer.h[0].self_attention.inv_norm_factor = factor
    with torch.no_grad(), lh.watch(model, deep=deep) as watch:
        model(torch.arange(24).reshape(2, 12))
    return watch


def test_deep_reads_the_scale_that_the_function_alone_cannot() -> None:
    alone, deep = (_watched(deep).last.records[0] for deep in (None, True))
    assert alone.facts.scale is None
    assert deep.facts.scale == pytest.approx(1 / math.sqrt(_WIDTH))
    for name in ("max_logit", "normalised_entropy", "saturated"):
        assert getattr(deep.heads, name) == pytest.approx(getattr(alone.heads, name), rel=1e-5)


def test_deep_finds_a_missing_scale() -> None:
    assert [x.kind for x in lh.diagnose(_watched(True, factor=1.0)) if x.severity != "note"] == ["wrong scale"]
