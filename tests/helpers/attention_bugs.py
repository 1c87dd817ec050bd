"""Realistic attention bugs, each a few lines of one small transformer, with its corrected twin beside it.

`BUGS[name]` makes the model (wrong or right) and says the batch and which words the warning must have. The model writes
its attention out by hand, as people do; every option of it is right unless `bug` names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS, TOKENS, ROWS = 50, 13, 3


def rotate(x: Tensor, first: int | Tensor = 0, reset: int = 0) -> Tensor:
    """RoPE on (B, H, T, D), halves; positions from `first` on, again from 0 after `reset` of them."""
    T, D = x.shape[-2:]
    positions = torch.arange(T) % reset if reset else torch.arange(T) + first
    angles = positions[:, None] / 100 ** (torch.arange(0, D, 2) / D)
    cos, sin = angles.cos().to(x), angles.sin().to(x)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class RmsNorm(nn.Module):
    def __init__(self, width: int, gain: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), gain))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Attention(nn.Module):
    def __init__(self, bug: str = "", *, width: int = 64, heads: int = 4, kv_heads: int = 4, **options: Any) -> None:
        super().__init__()
        self.bug, self.num_heads, self.num_kv_heads = bug, heads, kv_heads
        self.head_dim = width // heads
        self.causal = options.get("causal", True)
        self.window, self.softcap = options.get("window"), options.get("softcap")
        self.yarn_factor = options.get("yarn_factor")
        self.rope, self.alibi = options.get("rope", False), options.get("alibi", False)
        self.dropout = 0.1
        self.q_proj = nn.Linear(width, heads * self.head_dim)
        self.k_proj, self.v_proj = (nn.Linear(width, kv_heads * self.head_dim) for _ in range(2))
        self.o_proj = nn.Linear(heads * self.head_dim, width)
        if options.get("qk_norm"):
            gain = 12.0 if bug == "QK-norm gains of 12" else 1.0
            self.q_norm, self.k_norm = RmsNorm(self.head_dim, gain), RmsNorm(self.head_dim, gain)
        if bug == "pruned heads":
            with torch.no_grad():
                self.o_proj.weight[:, : 2 * self.head_dim] = 0.0

    def forward(self, x: Tensor, context: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
        q, k, v = self._projected(x, x if context is None else context)
        D = self.head_dim
        if self.rope and context is None:
            q, k = self._rotated(q, k)
            v = rotate(v) if self.bug == "RoPE on values" else v
        scale = self._scale(context is not None)
        if self.bug == "d_k^-1/4 on q only":
            q, scale = q * D**-0.25, 1.0
        half = self.bug == "fp16 product"
        s = ((q.half() @ k.half().mT if half else q @ k.mT) * scale).float()
        if self.bug == "one head unscaled":
            s = torch.cat((s[:, :1] / scale, s[:, 1:]), 1)
        if self.softcap and self.bug != "softcap missing":
            s = self.softcap * torch.tanh(s / self.softcap)
        if self.alibi:
            s = s + self._slopes(s.shape[-1])
        hidden = self._hidden(s, keep, context is not None)
        return self.o_proj(self._joined(self._weights(s, hidden) @ v))

    # ---- parts

    def _projected(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.q_proj(x), self.k_proj(context), self.v_proj(context)
        H, G, D = self.num_heads, self.num_kv_heads, self.head_dim
        if self.bug == "view without transpose":
            return tuple(y.view(len(x), H, -1, D) for y in (q, k, v))  # type: ignore[return-value]
        q, k, v = (y.unflatten(-1, (n, D)).transpose(1, 2) for y, n in ((q, H), (k, G), (v, G)))
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        if self.bug == "grouped heads in the wrong order":
            return q, k.repeat(1, H // G, 1, 1), v.repeat(1, H // G, 1, 1)
        return q, k.repeat_interleave(H // G, 1), v.repeat_interleave(H // G, 1)

    def _rotated(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.bug == "scale twice around RoPE":
            q = q * self.head_dim**-0.5
        if self.bug == "RoPE on q only":
            return rotate(q), k
        if self.bug == "positions reset on k":
            return rotate(q), rotate(k, reset=4)
        if self.bug == "k one position late":
            return rotate(q), rotate(k, first=1)
        factor = 0.1 * math.log(self.yarn_factor) + 1 if self.yarn_factor and self.bug != "YaRN factor missing" else 1.0
        return rotate(q) * factor, rotate(k) * factor

    def _scale(self, cross: bool) -> float:
        H, G, D = self.num_heads, self.num_kv_heads, self.head_dim
        if self.bug == "sqrt(d_model) in cross-attention only" and cross:
            return (H * D) ** -0.5
        if self.bug == "scale from kv heads":
            return (H * D // G) ** -0.5
        if self.bug == "temperature 0.1":
            return D**-0.5 / 0.1
        return 1.0 if self.bug == "no scale" else D**-0.5

    def _slopes(self, T: int) -> Tensor:
        distance = torch.arange(T)[:, None] - torch.arange(T)[None]
        slopes = 2.0 ** -(8.0 * torch.arange(1, self.num_heads + 1) / self.num_heads)
        bias = -slopes[:, None, None] * distance.abs()
        return -bias if self.bug == "ALiBi's sign" else bias

    def _hidden(self, s: Tensor, keep: Tensor | None, cross: bool) -> Tensor:
        T, S = s.shape[-2:]
        hidden = torch.zeros(T, S, dtype=torch.bool)
        if self.causal and not cross:
            first = {"sees the next token": 2, "token that does not see itself": 0}.get(self.bug, 1)
            hidden = torch.ones(T, S, dtype=torch.bool).triu(first)
            if self.bug == "inverted mask":
                hidden = ~hidden
            elif self.bug == "transposed mask":
                hidden = hidden.mT
        if self.window and self.bug != "window missing":
            hidden = hidden | torch.ones(T, S, dtype=torch.bool).tril(-self.window)
        hidden = hidden[None, None]
        if keep is not None and self.bug != "padding not masked":
            hidden = hidden | ~keep.bool()[:, None, None, :]
        return hidden

    def _weights(self, s: Tensor, hidden: Tensor) -> Tensor:
        if self.bug == "mask after softmax":
            return s.softmax(-1).masked_fill(hidden, 0.0)
        s = s.masked_fill(hidden, 1e-9 if self.bug == "1e-9 for -1e9" else -1e9)
        axis = {"softmax over queries": -2, "softmax over heads": 1}.get(self.bug, -1)
        return functional.dropout(s.softmax(axis), self.dropout, self.training or self.bug == "dropout at eval")

    def _joined(self, o: Tensor) -> Tensor:
        if self.bug == "view without transpose":
            return o.reshape(len(o), -1, self.num_heads * self.head_dim)
        return o.transpose(1, 2).flatten(2)


class Block(nn.Module):
    def __init__(self, bug: str, cross: bool, width: int, **options: Any) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(width), Attention(bug, width=width, **options)
        if cross:
            self.cross_norm, self.cross_attn = nn.LayerNorm(width), Attention(bug, width=width, **options)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor, context: Tensor | None, keep: Tensor | None) -> Tensor:
        x = x + self.attn(self.norm(x), None, keep)
        if context is not None:
            x = x + self.cross_attn(self.cross_norm(x), context)
        return x + self.mlp(x)


class Transformer(nn.Module):
    """Words in, words out. `layer`: the only one with the bug."""

    def __init__(self, bug: str, *, layers: int = 2, layer: int | None = None, width: int = 64, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        cross = options.pop("cross", False)
        rope = options.get("rope", False) or options.get("alibi", False)
        self.embed = nn.Embedding(WORDS, width)
        self.position = None if rope else nn.Embedding(64, width)
        bugs = [bug if layer in (None, n) else "right" for n in range(layers)]
        self.layers = nn.ModuleList(Block(each, cross, width, **options) for each in bugs)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        if self.position is not None:
            x = x + self.position(torch.arange(x.shape[1]))
        for block in self.layers:
            x = block(x, context, attention_mask)
        return self.head(self.norm(x))


class TorchEncoder(nn.Module):
    """nn.MultiheadAttention in a model whose batch comes first."""

    def __init__(self, bug: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, 64)
        self.attn = nn.MultiheadAttention(64, 4, batch_first=not bug)
        self.head = nn.Linear(64, WORDS)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        return self.head(x + self.attn(x, x, x, need_weights=False)[0])


class Mla(nn.Module):
    """Multi-head latent attention: d_k is 48 of which 16 rotate, values are 32 wide."""

    def __init__(self, bug: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.num_heads, self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim = 4, 32, 16, 32
        width = self.qk_nope_head_dim + self.qk_rope_head_dim
        self.scaling = (self.qk_nope_head_dim if bug else width) ** -0.5
        self.embed = nn.Embedding(WORDS, 64)
        self.q_proj = nn.Linear(64, 4 * width, bias=False)
        self.kv_a_proj = nn.Linear(64, 24 + self.qk_rope_head_dim, bias=False)
        self.kv_b_proj = nn.Linear(24, 4 * (self.qk_nope_head_dim + self.v_head_dim), bias=False)
        self.o_proj = nn.Linear(4 * self.v_head_dim, 64, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        q = self.q_proj(x).unflatten(-1, (4, -1)).transpose(1, 2)
        latent, k_rope = self.kv_a_proj(x).split((24, self.qk_rope_head_dim), -1)
        kv = self.kv_b_proj(latent).unflatten(-1, (4, -1)).transpose(1, 2)
        k, v = kv.split((self.qk_nope_head_dim, self.v_head_dim), -1)
        q = torch.cat((q[..., : self.qk_nope_head_dim], rotate(q[..., self.qk_nope_head_dim :])), -1)
        k = torch.cat((k, rotate(k_rope[:, None]).expand(-1, 4, -1, -1)), -1)
        o = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scaling)
        return self.o_proj(o.transpose(1, 2).flatten(2))


def words() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, WORDS, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))}


def padded() -> dict[str, Tensor]:
    mask = torch.ones(ROWS, TOKENS, dtype=torch.long)
    mask[1, -4:] = 0
    return words() | {"attention_mask": mask}


def with_context() -> dict[str, Tensor]:
    return words() | {"context": torch.randn(ROWS, 7, 64, generator=torch.Generator().manual_seed(2))}


@dataclass(frozen=True)
class Bug:
    make: Callable[[bool], nn.Module]  # whether it has the bug
    says: str  # a word of a warning's kind or reason
    batch: Callable[[], dict[str, Tensor]] = words
    against: bool = False  # found against the corrected twin only
    twin: Any = None  # corrected models with the same of these are the same


def _of(name: str, says: str, batch: Callable[[], dict[str, Tensor]] = words, **options: Any) -> Bug:
    twin = (batch.__name__, *sorted(options.items()))
    return Bug(lambda wrong: Transformer(name if wrong else "right", **options).eval(), says, batch, twin=twin)


def _folded(wrong: bool) -> nn.Module:
    """A checkpoint whose q weights were multiplied by 1/√d_k, as for a kernel without a scale, and are still scaled."""
    model = Transformer("right").eval()
    if wrong:
        with torch.no_grad():
            for block in model.layers:
                block.attn.q_proj.weight *= block.attn.head_dim**-0.5
                block.attn.q_proj.bias *= block.attn.head_dim**-0.5
    return model


BUGS: dict[str, Bug] = {
    "sees the next token": _of("sees the next token", "next token"),
    "1e-9 for -1e9": _of("1e-9 for -1e9", "mask without effect"),
    "mask after softmax": _of("mask after softmax", "after the softmax"),
    "view without transpose": _of("view without transpose", "transpose", causal=False),
    "batch_first mistaken": Bug(lambda wrong: TorchEncoder("bug" if wrong else "").eval(), "batch_first"),
    "padding not masked": _of("padding not masked", "padding not masked", padded, causal=False),
    "window missing": _of("window missing", "window", window=4),
    "softcap missing": _of("softcap missing", "softcap", softcap=20.0),
    "YaRN factor missing": _of("YaRN factor missing", "YaRN", rope=True, yarn_factor=8.0),
    "dropout at eval": _of("dropout at eval", "dropout"),
    "one head unscaled": _of("one head unscaled", "scale"),
    "softmax over queries": _of("softmax over queries", "over the queries", causal=False),
    "QK-norm gains of 12": _of("QK-norm gains of 12", "QK-norm", qk_norm=True),
    "ALiBi's sign": _of("ALiBi's sign", "ALiBi", alibi=True),
    "scale folded into weights": Bug(_folded, "folded", against=True),
    "RoPE on q only": _of("RoPE on q only", "RoPE", rope=True),
    "grouped heads in the wrong order": _of("grouped heads in the wrong order", "order", kv_heads=2),
    "sqrt(d_model) in cross-attention only": _of(
        "sqrt(d_model) in cross-attention only", "whole model's width", with_context, cross=True
    ),
    "scale twice around RoPE": _of("scale twice around RoPE", "applied twice", rope=True),
    "one layer of 24": _of("no scale", "no scale", layers=24, layer=17, width=32),
    "pruned heads": _of("pruned heads", "heads without effect"),
    "fp16 product": _of("fp16 product", "cast to float16"),
    "MLA 192/128": Bug(lambda wrong: Mla("bug" if wrong else "").eval(), "one part of a head"),
    "temperature 0.1": _of("temperature 0.1", "scale"),
    "d_k^-1/4 on q only": _of("d_k^-1/4 on q only", "half of the scale"),
    "scale from kv heads": _of("scale from kv heads", "key/value heads", kv_heads=2),
    "inverted mask": _of("inverted mask", "inverted"),
    "token that does not see itself": _of("token that does not see itself", "see itself"),
    "softmax over heads": _of("softmax over heads", "over the heads"),
    "transposed mask": _of("transposed mask", "inverted or transposed"),
    "k one position late": _of("k one position late", "offset", rope=True),
    "RoPE on values": _of("RoPE on values", "applied to v", rope=True),
    "positions reset on k": _of("positions reset on k", "rotated differently", rope=True),
}
