"""The weight on a document's first key, where a cache with a sliding window has dropped it: that of the whole pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

import levelhead as lh
from levelhead.watching.sliding_caches import NOT_KNOWN
from watched import one_thread

__all__ = ["one_thread"]  # a fixture

WINDOW, TOKENS = 6, 20
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "sliding_window": WINDOW, "head_dim": 8}
IDS = torch.randint(3, 60, (2, TOKENS), generator=torch.Generator().manual_seed(0))
CACHES = {
    "sliding": lambda config: transformers.DynamicCache(config=config),
    "whole": lambda config: transformers.DynamicCache(),
    "static": lambda config: transformers.StaticCache(config=config, max_cache_len=2 * TOKENS),
}


def mistral(implementation: str = "sdpa") -> nn.Module:
    torch.manual_seed(0)
    config = transformers.MistralConfig(**SIZES, num_hidden_layers=1)
    return transformers.MistralForCausalLM._from_config(config, attn_implementation=implementation).eval()


def gemma() -> nn.Module:
    """Layers with a window and without."""
    torch.manual_seed(0)
    config = transformers.Gemma2Config(**SIZES, num_hidden_layers=2)
    return transformers.Gemma2ForCausalLM._from_config(config, attn_implementation="eager").eval()


def first(w: Any) -> list[Any]:
    return [record.heads.mean_first for record in w.last.records]


def whole(model: nn.Module, mask: Tensor) -> list[Any]:
    with torch.no_grad(), lh.watch(model) as w:
        model(IDS, attention_mask=mask)
    return first(w)


def in_parts(model: nn.Module, mask: Tensor, cache: Any, length: int) -> Any:
    with torch.no_grad(), lh.watch(model) as w:
        w.step()
        for start in range(0, TOKENS, length):
            end = start + length
            model(IDS[:, start:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
        w.step()
    return w


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("length", [1, 3, 8])
@pytest.mark.parametrize("make", [mistral, gemma])
def test_a_key_that_has_left_the_cache_has_no_weight(make: Any, length: int, cache: str) -> None:
    model, mask = make(), torch.ones_like(IDS)
    w = in_parts(model, mask, CACHES[cache](model.config), length)
    for parts, once in zip(first(w), whole(model, mask), strict=True):
        np.testing.assert_allclose(parts, once, rtol=1e-5)
    assert not any(NOT_KNOWN in seen.note for seen in w.coverage())


def test_the_same_where_levelhead_computes() -> None:
    model, mask = mistral(), torch.ones_like(IDS)
    with lh.torch.huggingface.use(model):
        w = in_parts(model, mask, CACHES["sliding"](model.config), 1)
    np.testing.assert_allclose(first(w)[0], whole(model, mask)[0], rtol=1e-5)


def test_padding_that_is_still_in_the_cache_does_not_hide_the_first_key() -> None:
    model, mask = mistral(), torch.ones_like(IDS)
    mask[0, :10] = 0
    w = in_parts(model, mask, CACHES["sliding"](model.config), 4)
    np.testing.assert_allclose(first(w)[0], whole(model, mask)[0], rtol=1e-5)


class Held(nn.Module):
    """Keys that the model's own code dropped, with a window that its module names."""

    def __init__(self, sliding_window: int) -> None:
        super().__init__()
        self.sliding_window = sliding_window
        self.q, self.k = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (layer(x)[:, None] for layer in (self.q, self.k))
        return nn.functional.scaled_dot_product_attention(q[:, :, -1:], k[:, :, -WINDOW:], k[:, :, -WINDOW:])


def test_a_cache_that_is_not_seen_is_named() -> None:
    for window, named in ((WINDOW, True), (2 * WINDOW, False)):
        model = Held(window)
        with torch.no_grad(), lh.watch(model) as w:
            model(torch.randn(1, TOKENS, 32))
        assert any(NOT_KNOWN in seen.note for seen in w.coverage()) == named
