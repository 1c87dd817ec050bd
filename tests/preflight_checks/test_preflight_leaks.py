"""`lh.preflight`: tokens that leak outside of attention, padding that pooling queries see, masks of other sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import levelhead as lh
from attention_bugs import padded, words
from watched import one_thread  # noqa: F401

H, D, WIDTH = 4, 16, 64


def wrong(model: nn.Module, batch: Any) -> list[str]:
    return sorted({f.kind for f in lh.preflight(model, batch).findings if f.severity != "note"})


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        y = x if context is None else context
        q, k, v = (
            p(z).unflatten(-1, (H, D)).transpose(1, 2)
            for p, z in ((self.q_proj, x), (self.k_proj, y), (self.v_proj, y))
        )
        o = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(o.transpose(1, 2).flatten(2))


def causal(T: int, S: int | None = None) -> Tensor:
    return torch.ones(T, S or T, dtype=torch.bool).tril()


# ---- tokens that leak outside of attention


class Decoder(nn.Module):
    def __init__(self, before: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = before, after
        self.embed, self.attn, self.head = nn.Embedding(50, WIDTH), Attention(), nn.Linear(WIDTH, 50)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.before(self.embed(input_ids))
        return self.head(self.after(x + self.attn(x, mask=causal(x.shape[1]))))


def same(x: Tensor) -> Tensor:
    return x


def shifted(x: Tensor) -> Tensor:
    """Convolution over the token and the one before."""
    return x + functional.pad(x, (0, 0, 1, 0))[:, :-1]


@pytest.mark.parametrize(
    ("before", "after", "leaks"),
    [
        (same, same, False),
        (shifted, lambda x: x.flip(1).flip(1), False),
        (lambda x: x - x.mean(1, keepdim=True), same, True),
        (lambda x: x + x.roll(-1, 1), same, True),
        (same, lambda x: x + x.amax(1, keepdim=True), True),
    ],
)
def test_tokens_leak_in_the_models_own_code(before: Any, after: Any, leaks: bool) -> None:
    assert wrong(Decoder(before, after), words()) == (["not causal"] if leaks else [])


class TwoTokens(Decoder):
    """A second head reads the next token and predicts the one behind it."""

    def forward(self, input_ids: Tensor) -> Any:
        x = self.embed(input_ids)
        y = x + self.attn(x, mask=causal(x.shape[1]))
        following = functional.pad(x[:, 1:], (0, 0, 0, 1))
        return self.head(y), self.head(torch.cat((y[..., :32], following[..., 32:]), -1))


def test_a_second_head_that_reads_the_next_token_is_a_design() -> None:
    assert wrong(TwoTokens(same, same), words()) == []


class Translator(nn.Module):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bug, self.embed, self.conv = bug, nn.Embedding(50, WIDTH), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.encoder, self.self_attn, self.cross_attn = Attention(), Attention(), Attention()

    def forward(self, src: Tensor, tgt: Tensor, src_mask: Tensor) -> Tensor:
        keep = src_mask.bool()[:, None, None]
        x, y = self.embed(src), self.embed(tgt)
        x, y = x + self.encoder(x, mask=keep), y + self.self_attn(y, mask=causal(tgt.shape[1]))
        masks = {"causal": keep & causal(tgt.shape[1], src.shape[1]), "no padding": None}
        y = y + self.cross_attn(y, x, mask=masks.get(self.bug, keep))
        return self.conv(y.transpose(1, 2)).transpose(1, 2) if self.bug == "conv" else y


@pytest.mark.parametrize(
    ("bug", "kinds"),
    [
        ("", []),
        ("causal", ["causal mask in cross-attention"]),
        ("no padding", ["padding not masked"]),
        ("conv", ["not causal"]),
    ],
)
def test_a_decoder_that_reads_another_sequence(bug: str, kinds: list[str]) -> None:
    ids = words()["input_ids"]
    mask = padded()["attention_mask"]
    assert wrong(Translator(bug), {"src": ids, "tgt": ids[:, :8].flip(1), "src_mask": mask}) == kinds


# ---- padding


class Pooled(nn.Module):
    """Latents that read the tokens; one result for each row."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.masked, self.embed, self.latents = masked, nn.Embedding(50, WIDTH), nn.Parameter(torch.randn(5, WIDTH))
        self.read, self.head = Attention(), nn.Linear(WIDTH, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        z, mask = self.latents.expand(len(input_ids), -1, -1), attention_mask.bool()[:, None, None]
        return self.head((z + self.read(z, self.embed(input_ids), mask if self.masked else None)).mean(1))


class Encoder(nn.Module):
    """What is done with the mask, beside or in place of hiding keys."""

    def __init__(self, use: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use, self.embed, self.kinds = use, nn.Embedding(50, WIDTH), nn.Embedding(2, WIDTH)
        self.attn, self.head = Attention(), nn.Linear(WIDTH, 5)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x, keep = self.embed(input_ids), attention_mask.bool()
        x = x * keep[..., None] if "zero" in self.use else x
        x = x + self.kinds(attention_mask) if self.use == "embed" else x
        x = x + self.attn(x, mask=keep[:, None, None] if "hide" in self.use else None)
        return self.head(x.mean(1)) if "mean" in self.use else self.head(x)


@pytest.mark.parametrize(
    ("model", "kinds"),
    [
        (Pooled(True), []),
        (Pooled(False), ["padding not masked"]),
        (Encoder("zero"), ["padding not masked"]),
        (Encoder("zero, hide"), []),
        (Encoder("embed"), []),
        (Encoder("nothing"), ["padding not masked"]),
    ],
)
def test_what_is_done_with_padding(model: nn.Module, kinds: list[str]) -> None:
    assert wrong(model, padded()) == kinds


def test_pooling_over_padding_is_not_judged() -> None:
    check = lh.preflight(Encoder("hide, mean"), padded())["padding independence"]
    assert (check.verdict, "padded tokens are pooled" in check.moved) == ("not judged", True)
