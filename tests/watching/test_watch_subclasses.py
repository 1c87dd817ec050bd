"""Tensor subclasses with rules of their own for attention: watching changes no bit of a result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import levelhead as lh
from watched import one_thread as one_thread

HEADS, WIDTH, KEYS = 2, 32, 10
BIASES = [
    pytest.param(10, causal_upper_left, id="upper left"),
    pytest.param(10, causal_lower_right, id="lower right"),
    pytest.param(4, causal_upper_left, id="upper left, fewer queries"),
    pytest.param(4, causal_lower_right, id="lower right, fewer queries"),
]


class Attention(nn.Module):
    """Self-attention of the last `queries` tokens with any mask."""

    def __init__(self, queries: int, mask: Any) -> None:
        super().__init__()
        self.num_heads, self.queries, self.mask = HEADS, queries, mask
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def qkv(self, x: Tensor) -> list[Tensor]:
        parts = self.project(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        return [q[:, :, -self.queries :], k, v]

    def forward(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(*self.qkv(x), attn_mask=self.mask)


def model(queries: int, mask: Any) -> nn.Module:
    torch.manual_seed(3)
    return nn.ModuleDict({"attention": Attention(queries, mask)})["attention"]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("queries", "make"), BIASES)
def test_causal_biases_keep_their_bits_and_are_measured(
    queries: int, make: Callable[[int, int], Tensor], compiled: bool
) -> None:
    watched = nn.Sequential(model(queries, make(queries, KEYS)))
    x = torch.randn(2, KEYS, WIDTH)
    run = torch.compile(watched, backend="aot_eager", fullgraph=True) if compiled else watched
    alone = watched(x)
    with lh.watch(watched) as watch:
        seen = run(x)
        watch.step()
        heads = watch.last["0"].heads
    assert torch.equal(seen, alone)
    assert torch.equal(watched(x), alone)
    q, k, _ = (part.detach().numpy() for part in watched[0].qkv(x))
    mask = watched[0].mask._materialize().numpy()
    truth = lh.observe(q, k, mask=mask)
    np.testing.assert_allclose(heads.max_logit, truth.heads.max_logit.max(0), rtol=1e-5)


class Compares(Tensor):
    """A mask that compares the function it receives, with the one found now and the one kept."""

    kept = functional.scaled_dot_product_attention

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is functional.scaled_dot_product_attention and func is cls.kept:
            options = dict(kwargs or {}) | {"attn_mask": None, "is_causal": True}
            return functional.scaled_dot_product_attention(*args[:3], **options)
        return super().__torch_function__(func, types, args, kwargs)


def test_a_subclass_finds_the_function_it_knows_and_is_named_as_not_seen() -> None:
    watched = nn.Sequential(model(KEYS, torch.zeros(KEYS, KEYS).as_subclass(Compares)))
    x = torch.randn(2, KEYS, WIDTH)
    alone = watched(x)
    with lh.watch(watched) as watch:
        seen = watched(x)
        watch.step()
        report = str(watch)
    assert torch.equal(seen, alone)
    assert "Compares" in report


def test_ragged_tensors_keep_their_bits() -> None:
    def ragged(*lengths: int) -> Tensor:
        parts = [torch.randn(n, HEADS, WIDTH) for n in lengths]
        return torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)

    class Ragged(nn.Module):
        num_heads = HEADS

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(q, k, v)

    watched = nn.ModuleDict({"attention": Ragged()})["attention"]
    q = ragged(5, 7)
    alone = watched(q, q, q)
    with lh.watch(watched):
        seen = watched(q, q, q)
    assert torch.equal(seen.values(), alone.values())
