"""QK-clip: passes with other weights than those that it writes do not count."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor, nn
from torch.func import functional_call

from levelhead.remedies import QKClip

WIDTH, HEADS, TAU = 16, 4, 0.5


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v)


class ByHand(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return ((q @ k.mT) / q.shape[-1] ** 0.5).softmax(-1) @ v


class Torchs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return out


def batch() -> Tensor:
    return torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(1))


def made(kind: Callable[[], nn.Module] = Attention) -> nn.Module:
    torch.manual_seed(0)
    model = kind()
    with torch.no_grad():
        for x in model.parameters():
            x.mul_(4.0)
    return model


def times(model: nn.Module, factor: float) -> dict[str, Tensor]:
    return {name: factor * x.detach() for name, x in model.named_parameters()}


def student(model: nn.Module) -> None:
    model(batch())


def teacher(model: nn.Module, factor: float = 5.0) -> None:
    with torch.no_grad():
        functional_call(model, times(model, factor), (batch(),))


def lost_teacher(model: nn.Module) -> None:
    teacher(model, math.nan)


def same_by_name(model: nn.Module) -> None:
    functional_call(model, dict(model.named_parameters()), (batch(),))


def same_detached(model: nn.Module) -> None:
    functional_call(model, {name: x.detach() for name, x in model.named_parameters()}, (batch(),))


def compiled_teacher(model: nn.Module) -> None:
    compiled: Any = torch.compile(model, backend="eager")
    with torch.no_grad():
        functional_call(compiled, {f"_orig_mod.{name}": x for name, x in times(model, 5.0).items()}, (batch(),))


def clipped_by(passes: Iterable[Callable[[nn.Module], None]], kind: Any = Attention, shown: bool = False) -> Any:
    """Weights after these passes and a clip, and what it did; `shown`: a batch shows the rows beforehand."""
    model = made(kind)
    with QKClip(model, TAU, batch=batch() if shown else None) as clip:
        for each in passes:
            each(model)
        clipped = clip()
    return {name: x.detach().clone() for name, x in model.named_parameters()}, clipped


@pytest.mark.parametrize("kind", [Attention, ByHand, Torchs])
@pytest.mark.parametrize(
    "passes",
    [
        (student, teacher),
        (teacher, student),
        (student, teacher, teacher, lost_teacher),
        (same_by_name,),
        (same_detached, teacher),
    ],
)
def test_a_clip_takes_its_factors_from_the_weights_that_it_writes(passes: Any, kind: Any) -> None:
    alone, wanted = clipped_by([student], kind)
    weights, clipped = clipped_by(passes, kind)
    assert len(wanted) == HEADS
    assert clipped.heads == pytest.approx(wanted.heads, rel=1e-5)  # torch may take its fast path without gradients
    for name, x in alone.items():
        torch.testing.assert_close(weights[name], x, rtol=1e-5, atol=1e-7)


def test_other_weights_in_a_compiled_model_do_not_count() -> None:
    torch._dynamo.reset()
    alone, wanted = clipped_by([student], shown=True)
    weights, clipped = clipped_by([student, compiled_teacher], shown=True)
    assert clipped == wanted
    assert all(torch.equal(weights[name], x) for name, x in alone.items())
    torch._dynamo.reset()


def test_passes_with_other_weights_alone_are_named() -> None:
    with pytest.raises(ValueError, match=r"other weights than its own alone \(functional_call\)"):
        clipped_by([teacher])
    before = made().state_dict()
    with pytest.warns(UserWarning, match=r"other weights than its own alone \(functional_call\)"):
        weights, clipped = clipped_by([teacher], shown=True)
    assert not clipped.heads
    assert clipped.largest == -math.inf
    assert all(torch.equal(weights[name], x) for name, x in before.items())


def test_weights_that_were_replaced_on_the_way_are_the_models_own() -> None:
    model = made()
    with QKClip(model, TAU) as clip:
        student(model)
        clip()
        model.q.weight = nn.Parameter(3.0 * model.q.weight.detach())  # type: ignore[union-attr, operator]
        student(model)
        teacher(model)
        assert len(clip()) == HEADS
        student(model)
        assert clip().largest == pytest.approx(TAU, rel=1e-4)


def test_weights_of_passes_without_a_step_do_not_pile_up() -> None:
    model = made()
    with QKClip(model, TAU) as clip:
        for factor in range(2, 8):
            teacher(model, factor)
        assert all(len(those) == 1 for those in clip._passes._apart.values())
        student(model)
        assert len(clip()) == HEADS
