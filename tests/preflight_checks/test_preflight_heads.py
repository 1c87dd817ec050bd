"""`lh.preflight`: which part of a projection and which head is what: split, shared, grouped, turned, cast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import levelhead as lh
from attention_bugs import words
from watched import one_thread  # noqa: F401

H, D, WIDTH = 4, 16, 64


def wrong(model: nn.Module) -> list[str]:
    return sorted({f.kind for f in lh.preflight(model, words()).findings if f.severity != "note"})


class Model(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.layer = nn.Embedding(50, WIDTH), nn.LayerNorm(WIDTH), layer

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        return x + self.layer(self.norm(x))


class Fused(nn.Module):
    """One projection for q, k and v, or one for q and one for k and v."""

    def __init__(self, name: str, groups: int, swapped: bool) -> None:
        super().__init__()
        self.groups, self.swapped = groups, swapped
        self.to_q = nn.Linear(WIDTH, WIDTH) if name == "to_kv" else None
        self.add_module(name, nn.Linear(WIDTH, (H * (name != "to_kv") + 2 * groups) * D))
        self.both, self.out = getattr(self, name), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        *q, k, v = self.both(x).unflatten(-1, (-1, D)).transpose(1, 2).split(self.groups, 1)
        heads = torch.cat(q, 1) if self.to_q is None else self.to_q(x).unflatten(-1, (H, D)).transpose(1, 2)
        k, v = (v, k) if self.swapped else (k, v)
        o = functional.scaled_dot_product_attention(heads, k, v, is_causal=True, enable_gqa=True)
        return self.out(o.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("name", "groups"), [("c_attn", 4), ("qkv", 2), ("to_kv", 4)])
def test_keys_and_values_of_one_projection(name: str, groups: int) -> None:
    assert wrong(Model(Fused(name, groups, swapped=True))) == ["keys and values swapped"]
    assert wrong(Model(Fused(name, groups, swapped=False))) == []


class Grouped(nn.Module):
    """Heads of a group in an axis of their own; queries (B, T, G, R, D)."""

    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.bug = bug
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k_proj, self.v_proj = nn.Linear(WIDTH, 2 * D), nn.Linear(WIDTH, 2 * D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, D)) for p in (self.q_proj, self.k_proj, self.v_proj))
        q = q.unflatten(2, (2, 2))
        q = q.transpose(2, 3) if self.bug == "order" else q
        s = torch.einsum("btgrd,bsgd->bgrts", q, k) * D**-0.5
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -1e4)
        s = s.softmax({"groups": 1, "heads of a group": 2}.get(self.bug, -1))
        return self.o_proj(torch.einsum("bgrts,bsgd->btgrd", s, v).flatten(2))


@pytest.mark.parametrize(
    ("bug", "kinds"),
    [
        ("", []),
        ("order", ["grouped heads in the wrong order"]),
        ("groups", ["softmax over the wrong axis"]),
        ("heads of a group", ["softmax over the wrong axis"]),
    ],
)
def test_groups_in_an_axis_of_their_own(bug: str, kinds: list[str]) -> None:
    assert wrong(Model(Grouped(bug))) == kinds


def turned(x: Tensor, pairs: str, angles: str) -> Tensor:
    at = torch.arange(x.shape[2])[:, None] * 1e4 ** -(torch.arange(0, D, 2) / D)
    at = torch.cat((at, at), 1) if angles == "halves" else at.repeat_interleave(2, 1)
    if pairs == "halves":
        other = torch.cat((-x[..., D // 2 :], x[..., : D // 2]), -1)
    else:
        other = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * at.cos() + other * at.sin()


class ByHand(nn.Module):
    def __init__(self, bug: str = "", pairs: str = "", angles: str = "", keys: str = "") -> None:
        super().__init__()
        self.bug, self.pairs, self.angles, self.keys = bug, pairs, angles, keys or pairs
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (H, D)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.pairs:
            q = turned(q, self.pairs, self.angles)
            k = turned(k, self.keys, self.angles if self.keys == self.pairs else self.keys)
        s = (q.float() @ k.float().mT * D**-0.5).to(torch.float16 if self.bug == "half" else torch.float32)
        w = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -1e4).softmax(-1).to(v.dtype)
        w = w.mean(1, keepdim=True) if self.bug == "mean" else w
        return self.o_proj((w @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({"bug": "mean"}, ["heads share their weights"]),
        ({"bug": "half"}, ["fp16 product"]),
        ({"pairs": "halves", "angles": "neighbours"}, ["RoPE pairs mixed"]),
        ({"pairs": "neighbours", "angles": "halves"}, ["RoPE pairs mixed"]),
        ({"pairs": "halves", "angles": "halves", "keys": "neighbours"}, ["q and k rotated differently"]),
        ({"pairs": "halves", "angles": "halves"}, []),
        ({"pairs": "neighbours", "angles": "neighbours"}, []),
        ({}, []),
    ],
)
def test_heads_weights_and_rotations(options: dict[str, Any], kinds: list[str]) -> None:
    assert wrong(Model(ByHand(**options))) == kinds


def test_logits_of_a_model_in_half_precision_are_no_bug() -> None:
    assert "fp16 product" not in wrong(Model(ByHand("half")).half())


class Adapted(ByHand):
    """A low-rank addition to the queries, written out beside their projection."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale, self.down, self.up = scale, nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (H, D)).transpose(1, 2)
            for y in (self.q_proj(x) + 2 * self.up(self.down(x)), self.k_proj(x), self.v_proj(x))
        )
        s = (q @ k.mT * self.scale).masked_fill(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1), -1e4)
        return self.o_proj((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_the_scale_behind_a_low_rank_addition() -> None:
    assert wrong(Model(Adapted(1.0))) == ["wrong scale"]
    assert wrong(Model(Adapted(D**-0.5))) == []
