"""Padding in models that `use(model)` serves: their statistics are those of the model as it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import BloomConfig, BloomModel, GPTJConfig, GPTJModel

import levelhead as lh
import levelhead.torch as lt
from levelhead.runs.record import Record
from tiny_models import HEADS, MODELS, TOKENS, WIDTH


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["Llama", "GPTJ", "Bloom"])  # by the interface; by hand; heads in the batch
def test_padded_rows_of_a_served_eager_model_count_nowhere(name: str, side: str) -> None:
    inputs = MODELS["Llama"].inputs()
    torch.manual_seed(0)
    if name == "GPTJ":
        model = GPTJModel(GPTJConfig(vocab_size=64, n_embd=WIDTH, n_head=HEADS, n_layer=1, rotary_dim=8)).eval()
    elif name == "Bloom":
        model = BloomModel(BloomConfig(vocab_size=64, hidden_size=WIDTH, n_head=HEADS, n_layer=1)).eval()
    else:
        model = MODELS[name].make("eager")
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, : TOKENS // 3] = 0
    inputs["attention_mask"] = mask if side == "left" else mask.flip(1)

    def watched() -> tuple[Record, ...]:
        with torch.no_grad(), lh.watch(model, deep=True) as w:
            model(**inputs)
        return w.last.records

    plain = watched()
    with lt.huggingface.use(model):
        served = watched()
    for a, b in zip(plain, served, strict=True):
        assert "levelhead" in b.facts.how
        assert name == "Bloom" or b.facts.effective_scale == pytest.approx(8**-0.5)
        np.testing.assert_array_equal(a.heads.rows, b.heads.rows)
        for field in ("max_logit", "mean_entropy", "mean_first", "var_logit"):
            np.testing.assert_allclose(getattr(a.heads, field), getattr(b.heads, field), rtol=1e-4, atol=1e-6)
