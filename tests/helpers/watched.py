"""Small models that attend in every way there is, and what running one leaves behind.

Shared by the tests of `watch`; holds no test. A model's outcome is everything that watching must
not change: outputs, gradients, and the random numbers that come next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention as bound_earlier

WIDTH, HEADS, TOKENS, BATCH = 32, 4, 10, 2

Attend = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small wait for each other's threads longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Attention(nn.Module):
    """Projections around `attend(self, q, k, v)`; (B, H, T, D) in between."""

    def __init__(
        self,
        attend: Attend,
        *,
        heads: int = HEADS,
        kv_heads: int | None = None,
        value_width: int = WIDTH // HEADS,
        width: int = WIDTH,
    ) -> None:
        super().__init__()
        self.num_heads, self.kv_heads = heads, kv_heads or heads
        self.d_k = width // heads
        self.attend = attend
        self.q_proj = nn.Linear(width, heads * self.d_k)
        self.k_proj = nn.Linear(width, self.kv_heads * self.d_k)
        self.v_proj = nn.Linear(width, self.kv_heads * value_width)
        self.out_proj = nn.Linear(heads * value_width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (n, -1)).transpose(1, 2)
            for project, n in (
                (self.q_proj, self.num_heads),
                (self.k_proj, self.kv_heads),
                (self.v_proj, self.kv_heads),
            )
        )
        return self.out_proj(self.attend(self, q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, attend: Attend, **options: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attn = Attention(attend, **options)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class Stack(nn.Module):
    def __init__(self, attend: Attend, depth: int = 2, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(attend, **options) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def stack(attend: Attend, depth: int = 2, *, dtype: Any = torch.float32, **options: Any) -> Stack:
    torch.manual_seed(0)
    return Stack(attend, depth, **options).to(dtype)


def batch(*, seed: int = 1, dtype: Any = torch.float32, tokens: int = TOKENS) -> Tensor:
    return torch.randn(BATCH, tokens, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---- ways to attend


def sdpa(**options: Any) -> Attend:
    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, **options)

    return attend


def sdpa_bound_earlier(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return bound_earlier(q, k, v, is_causal=True)


def sdpa_of_three_dimensions(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    flat = (x.flatten(0, 1) for x in (q, k, v))
    return functional.scaled_dot_product_attention(*flat).unflatten(0, q.shape[:2])


def hidden(T: int) -> Tensor:
    return torch.ones(T, T, dtype=torch.bool).triu(1)


def by_hand(
    product: str = "matmul",
    softmax: str = "method",
    place: str = "after",
    cap: float | None = None,
    mask: str = "fill",
    scale: float | None = None,
) -> Attend:
    """softmax(q kᵀ · scale) v, written out in one of the ways people write it."""

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        T, D = q.shape[-2:]
        factor = 1 / math.sqrt(D) if scale is None else scale
        if place == "before":
            q = q * factor
        elif place == "in place":
            q *= factor
        elif place == "both":
            q, k = q * factor**0.5, k * factor**0.5
        s = _PRODUCTS[product](q, k)
        if place == "after":
            s = s * factor
        elif place == "divided":
            s = s / torch.tensor(1 / factor)
        if cap is not None:
            s = cap * torch.tanh(s / cap)
        if mask == "fill":
            s = s.masked_fill(hidden(T), torch.finfo(s.dtype).min)
        elif mask == "add":
            s = s + torch.zeros(T, T).masked_fill(hidden(T), -math.inf).to(s)
        return _SOFTMAXES[softmax](s) @ v

    return attend


def _baddbmm(q: Tensor, k: Tensor) -> Tensor:
    flat_q, flat_k = q.flatten(0, 1), k.flatten(0, 1)
    empty = q.new_empty(flat_q.shape[0], q.shape[-2], k.shape[-2])
    scores = torch.baddbmm(empty, flat_q, flat_k.transpose(1, 2), beta=0.0, alpha=1.0)
    return scores.unflatten(0, q.shape[:2])


_PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda q, k: torch.matmul(q, k.transpose(-1, -2)),
    "einsum": lambda q, k: torch.einsum("bhid,bhjd->bhij", q, k),
    "turned": lambda q, k: (k @ q.mT).mT,
    "baddbmm": _baddbmm,
}
_SOFTMAXES: dict[str, Callable[[Tensor], Tensor]] = {
    "method": lambda s: s.softmax(-1),
    "torch": lambda s: torch.softmax(s, dim=-1),
    "functional": lambda s: functional.softmax(s, dim=-1, dtype=torch.float32),
    "module": lambda s: nn.Softmax(dim=-1)(s),
}


# ---- what a run leaves behind


def tensors(result: Any) -> list[Tensor]:
    """All tensors of an output, in order."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, dict):
        result = list(result.values())
    return [x for part in result or () for x in tensors(part)] if _is_list(result) else []


def _is_list(x: Any) -> bool:
    return isinstance(x, list | tuple)


def outcome(model: nn.Module, run: Callable[[], Any], *, learns: bool = True) -> list[Tensor]:
    """Outputs, the gradient of every parameter, and what the generator gives next."""
    torch.manual_seed(7)
    model.zero_grad()
    with torch.set_grad_enabled(learns):
        outputs = tensors(run())
    found = [x.detach().clone() for x in outputs]
    if learns:
        sum(x.float().square().sum() for x in outputs if x.requires_grad).backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [*found, torch.rand(4)]


def same(a: list[Tensor], b: list[Tensor], *, within: float = 0.0) -> None:
    assert len(a) == len(b) > 1
    for x, y in zip(a, b, strict=True):
        assert x.dtype is y.dtype
        if within:
            torch.testing.assert_close(x, y, rtol=within, atol=within)
        else:
            assert torch.equal(x, y) or (
                torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(), y.nan_to_num())
            )
