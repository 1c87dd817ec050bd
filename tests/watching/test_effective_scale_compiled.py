"""Inside compiled graphs the effective scale is judged as outside: whole graphs, the same bits, nothing fused away."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import levelhead as lh
from levelhead.watching.compiled import NO_GRADIENTS
from scale_layouts import LAYOUTS, WithCore
from watched import one_thread
from wrong_scale import D_K, HEADS, WIDTH, join, split

__all__ = ["one_thread"]  # a fixture


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tokens(length: int = 24) -> Tensor:
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(length))


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, fullgraph=True, backend="aot_eager", **options)


@pytest.mark.parametrize("name", ["core of its own", "latent", "own weights, linear", "scaled inside the projection"])
def test_layouts_are_read(name: str) -> None:
    torch.manual_seed(0)
    model = LAYOUTS[name](3.0)
    run = compiled(model, dynamic=True)
    wanted = run(tokens())
    torch._dynamo.reset()
    with lh.watch(model) as w:
        assert torch.equal(run(tokens()), wanted)
        run(tokens(40))
    facts = w.last.records[0].facts
    assert facts.effective_scale == pytest.approx(3.0 * facts.d_k**-0.5, rel=1e-5)


class InPlace(nn.Module):
    """The layer's output is overwritten: the sample must be taken before. One head has no scale."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), split(self.k(x)), split(self.v(x))
        q[..., D_K:] *= D_K**-0.5
        return join(functional.scaled_dot_product_attention(split(q), k, v, scale=1.0))


def test_what_is_overwritten_and_heads_of_their_own() -> None:
    torch.manual_seed(0)
    model = InPlace()
    with lh.watch(model) as w:
        compiled(model)(tokens())
    right = D_K**-0.5
    assert w.last.records[0].facts.effective_scales == pytest.approx((1.0, *(right,) * (HEADS - 1)), rel=1e-5)
    (one,) = [finding for finding in lh.diagnose(w) if finding.severity == "warning"]
    assert (one.kind, one.head) == ("wrong scale", 0)


def test_a_part_that_is_compiled_has_the_layers_around_it() -> None:
    torch.manual_seed(0)
    model = WithCore(D_K**0.5)
    model.inner.compile(fullgraph=True, backend="aot_eager")
    with lh.watch(model) as w:
        model(tokens())
    assert w.last.records[0].facts.effective_scale == pytest.approx(1.0, rel=1e-5)
    assert ["no scale at all" in f.why for f in lh.diagnose(w) if f.severity == "warning"] == [True]


def test_gradients_that_are_not_read_are_named() -> None:
    torch.manual_seed(0)
    model = WithCore()
    with lh.watch(model, gradients=True) as w:
        compiled(model)(tokens()).sum().backward()
    assert [NO_GRADIENTS in line.note for line in w.coverage()] == [True]
    assert any(NO_GRADIENTS in line for line in lh.diagnose(w).verdict.not_judged)
