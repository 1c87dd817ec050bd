"""`lh.preflight`: tokens read behind a cache must get what the whole text gives them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import levelhead as lh
from attention_bugs import rotate, words
from levelhead.preflight_checks.result import Preflight
from watched import one_thread  # noqa: F401

H, D, WIDTH = 4, 16, 64


def wrong(result: Preflight) -> list[str]:
    return [f"{f.kind}: {f.module}: {f.why}" for f in result.findings if f.severity != "note"]


class Attention(nn.Module):
    def __init__(self, bug: str) -> None:
        super().__init__()
        self.bug = bug
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, past: Any = None) -> tuple[Tensor, Any]:
        q, k, v = (p(x).unflatten(-1, (H, D)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        before = 0 if past is None else past[0].shape[2]
        turned = min(before, 1) if self.bug == "offset" else before
        q, k = rotate(q, turned), k if self.bug == "turned again" else rotate(k, turned)
        if past is not None:
            k, v = (torch.cat((old, new), 2) for old, new in zip(past, (k, v), strict=True))
        kept = (k[:, :, 1:], v[:, :, 1:]) if self.bug == "lost" and past is not None else (k, v)
        if self.bug == "turned again":
            k = rotate(k) if past is None else torch.cat((k[:, :, :before], rotate(k[:, :, before:], before)), 2)
        T, S = q.shape[2], k.shape[2]
        mask = torch.ones(T, S, dtype=torch.bool).tril(0 if self.bug == "mask" else S - T)
        o = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(o.transpose(1, 2).flatten(2)), kept


class Decoder(nn.Module):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bug, self.embed, self.position = bug, nn.Embedding(50, WIDTH), nn.Embedding(64, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.layers = nn.ModuleList(Attention(bug if n else "") for n in range(2))

    def forward(self, input_ids: Tensor, past: Any = None, use_cache: bool = False) -> Any:
        before = 0 if past is None or self.bug == "position" else past[0][0].shape[2]
        x = self.embed(input_ids) + self.position(torch.arange(before, before + input_ids.shape[1]))
        present = []
        for norm, layer, kept in zip(self.norms, self.layers, past or (None, None), strict=True):
            y, now = layer(norm(x), kept)
            x, present = x + y, [*present, now]
        return (x, tuple(present)) if use_cache else x


@pytest.mark.parametrize(
    ("bug", "says"),
    [
        ("offset", "layers.1: .* is turned for another place"),
        ("turned again", "layers.1: .* cached keys are not those"),
        ("lost", "layers.1: .* the cache is not read, or lost some"),
        ("mask", "layers.1: .* the mask does not count the cached tokens"),
        ("position", "positions do not count the cached tokens"),
    ],
)
def test_a_cache_that_changes_results_is_named(bug: str, says: str) -> None:
    found = wrong(lh.preflight(Decoder(bug), words()))
    assert len(found) == 1
    assert found[0].startswith("cached decoding differs: ")
    assert re.search(says, found[0]), found


def test_a_cache_that_changes_nothing() -> None:
    result = lh.preflight(Decoder(), words())
    assert wrong(result) == []
    assert result["cached decoding"].verdict == "passed"


class Kept(nn.Module):
    """A cache that the model keeps itself, as large as the longest text."""

    def __init__(self, late: int = 0, keeps: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.late, self.keeps = nn.Embedding(50, WIDTH), late, keeps
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.keys, self.values = torch.zeros(3, H, 32, D), torch.zeros(3, H, 32, D)

    def forward(self, tokens: Tensor, start_pos: int) -> Tensor:
        T = tokens.shape[1]
        q, k, v = (w(self.embed(tokens)).unflatten(-1, (H, D)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, start_pos), rotate(k, start_pos - self.late * (start_pos > 0))
        if self.keeps:
            self.keys[:, :, start_pos : start_pos + T], self.values[:, :, start_pos : start_pos + T] = k, v
            k, v = (x[:, :, : start_pos + T] for x in (self.keys, self.values))
        mask = torch.ones(T, k.shape[2], dtype=torch.bool).tril(k.shape[2] - T)
        o = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.wo(o.transpose(1, 2).flatten(2))


def test_a_cache_that_the_model_keeps() -> None:
    batch = {"tokens": words()["input_ids"], "start_pos": 0}
    model = Kept()
    result = lh.preflight(model, batch)
    assert (wrong(result), result["cached decoding"].verdict) == ([], "passed")
    assert not model.keys.any()
    assert "its key is turned for another place" in str(wrong(lh.preflight(Kept(late=1), batch)))
    without = lh.preflight(Kept(keeps=False), batch)
    assert (wrong(without), without["cached decoding"].verdict) == ([], "not judged")


def test_a_model_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama as llama

    sizes = {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = llama.LlamaForCausalLM(llama.LlamaConfig(**sizes, num_attention_heads=4))
    result = lh.preflight(model, words())
    assert (wrong(result), result["cached decoding"].verdict) == ([], "passed")
    right = llama.LlamaRotaryEmbedding.forward

    def from_zero(self: nn.Module, x: Tensor, position_ids: Tensor) -> Any:
        return right(self, x, position_ids=position_ids - position_ids[:, :1])

    monkeypatch.setattr(llama.LlamaRotaryEmbedding, "forward", from_zero)
    assert "is turned for another place" in str(wrong(lh.preflight(model, words())))
