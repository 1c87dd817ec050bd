"""One attention, its projections and its scale put where different code bases have them.

Every class takes `times`: what the right scale is multiplied with, so that 1.0 is right and any other number a mistake.
Width 64, 4 heads of 16.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from wrong_scale import D_K, HEADS, WIDTH, join, split

GROUPS, NOPE, ROPE, RANK = 2, 16, 8, 24


def rotated(x: Tensor, *, neighbours: bool = False, part: int | None = None) -> Tensor:
    """RoPE on the last dimension, or on the first `part` of it."""
    width = part or x.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    angles = torch.arange(x.shape[-2])[:, None] / 10.0 ** (torch.arange(width // 2) / width)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = (turned[..., 0::2], turned[..., 1::2]) if neighbours else turned.chunk(2, -1)
    pair = a * cos - b * sin, b * cos + a * sin
    out = torch.stack(pair, -1).flatten(-2) if neighbours else torch.cat(pair, -1)
    return torch.cat([out, rest], -1)


class Core(nn.Module):
    """An attention core without projections, as torchtitan, Megatron and x-transformers have it."""

    def __init__(self, times: float) -> None:
        super().__init__()
        self.times = times

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, scale=self.times * q.shape[-1] ** -0.5)


class WithCore(nn.Module):
    """Projections around a core, rotated between."""

    def __init__(self, times: float = 1.0) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.inner = Core(times)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(w(x)) for w in (self.wq, self.wk, self.wv))
        return self.wo(join(self.inner(rotated(q), rotated(k), v)))


class Grouped(WithCore):
    """Grouped heads, repeated before the core; partly rotated, neighbours paired."""

    def __init__(self, times: float = 1.0) -> None:
        super().__init__(times)
        self.wk, self.wv = (nn.Linear(WIDTH, GROUPS * D_K) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q = split(self.wq(x))
        k, v = (split(w(x), GROUPS).repeat_interleave(HEADS // GROUPS, 1) for w in (self.wk, self.wv))
        q, k = (rotated(y, neighbours=True, part=8) for y in (q, k))
        return self.wo(join(self.inner(q, k, v)))


class Fused(nn.Module):
    """One projection; q, k and v innermost, beside each other by head, or heads innermost."""

    def __init__(self, times: float = 1.0, layout: str = "h 3 d") -> None:
        super().__init__()
        self.layout, self.inner = layout, Core(times)
        self.linear = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        sizes = {"h": HEADS, "3": 3, "d": D_K}
        names = self.layout.split()
        parts = self.linear(x).unflatten(-1, [sizes[name] for name in names])
        at = [2 + names.index(name) for name in ("3", "h", "d")]
        q, k, v = parts.permute(at[0], 0, at[1], 1, at[2])
        return join(self.inner(q, k, v))


class SequenceFirst(nn.Module):
    """Tokens before the batch until the core, as Megatron has them."""

    def __init__(self, times: float = 1.0) -> None:
        super().__init__()
        self.linear_qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.core_attention = Core(times)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.linear_qkv(x.transpose(0, 1)).unflatten(-1, (HEADS, 3 * D_K))
        q, k, v = (y.permute(1, 2, 0, 3) for y in mixed.chunk(3, -1))
        return join(self.core_attention(q, k, v))


class Latent(nn.Module):
    """DeepSeek's latent attention: heads of two parts, one of them with positions and shared keys."""

    def __init__(self, times: float = 1.0) -> None:
        super().__init__()
        self.q_a, self.q_b = nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, HEADS * (NOPE + ROPE), bias=False)
        self.q_norm = nn.RMSNorm(RANK)
        self.kv_a = nn.Linear(WIDTH, RANK + ROPE, bias=False)
        self.kv_norm = nn.RMSNorm(RANK)
        self.kv_b = nn.Linear(RANK, HEADS * (NOPE + D_K), bias=False)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        q = split(self.q_b(self.q_norm(self.q_a(x))))
        latent, positions = self.kv_a(x).split((RANK, ROPE), -1)
        nope, v = split(self.kv_b(self.kv_norm(latent))).split((NOPE, D_K), -1)
        shared = rotated(positions[:, None]).expand(-1, HEADS, -1, -1)
        q = torch.cat([q[..., :NOPE], rotated(q[..., NOPE:])], -1)
        k = torch.cat([nope, shared], -1)
        return join(functional.scaled_dot_product_attention(q, k, v, scale=self.times * (NOPE + ROPE) ** -0.5))


class RawWeights(nn.Module):
    """Weights of the module itself, with biases, through torch's function."""

    def __init__(self, times: float = 1.0, kind: str = "linear") -> None:
        super().__init__()
        self.kind, self.inner = kind, Core(times)
        shape = (3, WIDTH, HEADS, D_K) if kind == "einsum" else (3 * WIDTH, WIDTH)
        self.w_in = nn.Parameter(torch.randn(shape) / WIDTH**0.5)
        self.b_in = nn.Parameter(torch.randn(3 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "einsum":
            q, k, v = torch.einsum("btd,ndhe->nbhte", x, self.w_in)
        else:
            q, k, v = (split(y) for y in functional.linear(x, self.w_in, self.b_in).chunk(3, -1))
        return join(self.inner(q, k, v))


class ScaledInside(nn.Module):
    """The query projection is a module that scales what its layer puts out."""

    class Query(nn.Module):
        def __init__(self, times: float) -> None:
            super().__init__()
            self.layer, self.times = nn.Linear(WIDTH, WIDTH), times

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * (self.times * D_K**-0.5)

    def __init__(self, times: float = 1.0) -> None:
        super().__init__()
        self.query, self.keys = self.Query(times), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        k, v = (split(y) for y in self.keys(x).chunk(2, -1))
        return join(functional.scaled_dot_product_attention(split(self.query(x)), k, v, scale=1.0))


class Adapted(WithCore):
    """A low-rank adapter beside the query projection, as PEFT puts it there."""

    class Lora(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = nn.Linear(WIDTH, WIDTH)
            self.lora_A, self.lora_B = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base_layer(x) + 2.0 * self.lora_B(self.lora_A(x))

    def __init__(self, times: float = 1.0) -> None:
        super().__init__(times)
        self.wq = self.Lora()


class ByHandCore(Core):
    """A core that forms its softmax itself."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * (self.times * q.shape[-1] ** -0.5)).softmax(-1) @ v


class WithByHandCore(WithCore):
    def __init__(self, times: float = 1.0) -> None:
        super().__init__(times)
        self.inner = ByHandCore(times)


LAYOUTS = {
    "core of its own": WithCore,
    "core by hand": WithByHandCore,
    "grouped, partly rotated": Grouped,
    "fused h 3 d": Fused,
    "fused 3 h d": lambda times=1.0: Fused(times, "3 h d"),
    "fused h d 3": lambda times=1.0: Fused(times, "h d 3"),
    "fused d 3 h": lambda times=1.0: Fused(times, "d 3 h"),
    "sequence first": SequenceFirst,
    "latent": Latent,
    "own weights, linear": RawWeights,
    "own weights, einsum": lambda times=1.0: RawWeights(times, "einsum"),
    "scaled inside the projection": ScaledInside,
    "adapter": Adapted,
}
