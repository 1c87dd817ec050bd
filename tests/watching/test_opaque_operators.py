"""Operators that may attend and cannot be followed are named; norms, rotations, gates and experts are not."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import levelhead as lh
from levelhead.errors import LevelheadValueError
from levelhead.watching.opaque_operators import IN_FUNCTION
from watched import BATCH, HEADS, TOKENS, WIDTH, batch, one_thread, sdpa, stack

__all__ = ["one_thread"]  # a fixture
D = WIDTH // HEADS
Mixing = Callable[[Tensor, Tensor, Tensor], Tensor]


def operator(name: str, schema: str, compute: Callable[..., Any]) -> Callable[..., Any]:
    made: Any = torch.library.custom_op(f"elsewhere::{name}", compute, mutates_args=(), schema=schema)
    return made  # type: ignore[no-any-return]


def softmaxed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1) * sin


THREE = "(Tensor a, Tensor b, Tensor c) -> Tensor"
mix = operator("mix", THREE, softmaxed)
turn = operator("turn", THREE, turned)
norm = operator("norm", THREE, lambda x, w, b: nn.functional.layer_norm(x, x.shape[-1:], w, b))
modulate = operator("modulate", THREE, lambda x, shift, scale: x * (1 + scale) + shift)
multiply = operator("multiply", "(Tensor a, Tensor b) -> Tensor", lambda a, b: a @ b)
turn_both = operator(
    "turn_both",
    "(Tensor a, Tensor b, Tensor c, Tensor d) -> (Tensor, Tensor)",
    lambda q, k, cos, sin: (turned(q, cos, sin), turned(k, cos, sin)),
)


class Mix(nn.Module):
    """A module whose name says nothing."""

    def __init__(self, mixing: Mixing) -> None:
        super().__init__()
        self.mixing = mixing
        self.qkv, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.LayerNorm(D)
        self.experts = nn.Parameter(torch.randn(2, BATCH * HEADS, D, D))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(BATCH, TOKENS, 3, HEADS, D).permute(2, 0, 3, 1, 4)
        return self.mixing(q, k, v).transpose(1, 2).flatten(2)


def mixed(mixing: Callable[..., Tensor], *, alone: bool = False) -> lh.watch:
    torch.manual_seed(0)
    mix = Mix(lambda q, k, v: mixing(mix, q, k, v))
    model = mix if alone else nn.Sequential(stack(sdpa(), depth=1), mix)
    with torch.no_grad(), lh.watch(model) as w:
        model(batch())
    return w


def lines(w: lh.watch) -> list[str]:
    return [line.how for line in w.coverage() if line.kind == "Mix"]


def angles() -> tuple[Tensor, Tensor]:
    angle = torch.arange(TOKENS)[:, None] * torch.ones(D)
    return angle.cos().expand(BATCH, 1, -1, -1), angle.sin().expand(BATCH, 1, -1, -1)


def foreign(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """As compiled code does: products into memory of its own, and kernels between that nothing sees."""
    z = torch.empty(a.shape[0], a.shape[1], b.shape[2])
    torch.bmm(a, b, out=z)
    numbers = z.numpy()
    numbers[:] = np.exp(numbers)
    numbers /= numbers.sum(-1, keepdims=True)
    return torch.bmm(z, c, out=torch.empty(a.shape[0], a.shape[1], c.shape[2]))


def compiled(module: Mix, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.reshape(-1, TOKENS, D) for x in (q, k, v))
    return foreign(q, k.mT, v).view(BATCH, HEADS, TOKENS, D)


def experts(module: Mix, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return foreign(q.reshape(-1, TOKENS, D), *module.experts).view(BATCH, HEADS, TOKENS, D)


torch.library.define("elsewhere::mix_named", "(Tensor a, *, Tensor b, Tensor c) -> Tensor")  # as custom_op cannot
torch.library.impl("elsewhere::mix_named", "CPU", lambda a, *, b, c: softmaxed(a, b, c))
mix_named: Any = torch.ops.elsewhere.mix_named
mix_listed = operator("mix_listed", "(Tensor a, Tensor[] b) -> Tensor", lambda a, b: softmaxed(a, *b))
mix_rows = operator("mix_rows", THREE, lambda q, k, v: rows(torch.stack([rows(x) for x in (q, k, v)])))
packed_attn = operator("packed_attn", "(Tensor a) -> Tensor", lambda a: softmaxed(*a.unbind(2)))
swish = operator("swish", THREE, lambda a, b, c: a * torch.sigmoid(b) * torch.sigmoid(c))
blend = operator("blend", THREE, lambda a, b, c: torch.lerp(a, b, torch.sigmoid(c)))


def rows(x: Tensor) -> Tensor:
    """(B, T, C) as heads; of stacked ones, their attention, as rows."""
    if x.dim() == 3:
        return x.unflatten(-1, (HEADS, D)).transpose(1, 2)
    return softmaxed(*x).transpose(1, 2).flatten(2)


def in_rows(mixing: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An operator on (B, T, C)."""
    return lambda module, q, k, v: rows(mixing(*(x.transpose(1, 2).flatten(2) for x in (q, k, v))))


def folded(module: Mix, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return mix(*(x.reshape(-1, TOKENS, D) for x in (q, k, v))).view(q.shape)  # type: ignore[no-any-return]


ATTENTION = [
    lambda module, q, k, v: mix(q, k, v),
    folded,
    lambda module, q, k, v: mix_named(q, b=k, c=v),
    lambda module, q, k, v: mix_listed(q, [k, v]),
    lambda module, q, k, v: mix(q, k, v[..., :2]).repeat(1, 1, 1, D // 2),
    lambda module, q, k, v: packed_attn(torch.stack([q, k, v], 2)),
    in_rows(mix_rows),
    in_rows(lambda q, k, v: mix(q, k, v)),
]


@pytest.mark.parametrize("mixing", ATTENTION)
def test_a_custom_operator_with_the_shapes_of_attention_is_named(mixing: Any) -> None:
    w = mixed(mixing)
    (how,) = lines(w)
    assert re.match("op elsewhere::[a-z_]+ is not described", how)
    assert any("op elsewhere::" in reason for reason in lh.diagnose(w).verdict.not_judged)


def test_a_product_of_a_product_in_compiled_code_is_named() -> None:
    assert lines(mixed(compiled)) == [IN_FUNCTION]


NO_ATTENTION = [
    lambda module, q, k, v: norm(q, module.norm.weight, module.norm.bias),
    lambda module, q, k, v: turn(q, *angles()),
    lambda module, q, k, v: turn_both(q, k[:, :1], *angles())[0],
    lambda module, q, k, v: multiply(q, k.mT) @ v,
    lambda module, q, k, v: modulate(*(x.transpose(1, 2).flatten(2) for x in (q, k, v))).view(q.shape),
    lambda module, q, k, v: modulate(q, k[:, :1, :1], v[:, :1, :1]),
    in_rows(swish),
    in_rows(blend),
    experts,
]


@pytest.mark.parametrize("mixing", NO_ATTENTION)
def test_other_operators_are_not_named(mixing: Any) -> None:
    assert lines(mixed(mixing)) == []


def test_alone_the_error_says_what_was_looked_for() -> None:
    with pytest.raises(LevelheadValueError, match="what custom operators, compiled functions .* is not followed"):
        lh.diagnose(mixed(lambda module, q, k, v: multiply(q, k.mT) @ v, alone=True))
