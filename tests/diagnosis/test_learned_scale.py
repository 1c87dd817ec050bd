"""A scale that is a learned parameter: its start counts, what training makes of it is no fault unless far outside."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import levelhead as lh

WIDTH, HEADS = 64, 4
D = WIDTH // HEADS
RIGHT = D**-0.5
HOW: dict[str, tuple[Callable[[float], float], Callable[[Tensor], Tensor]]] = {  # to a parameter, and back
    "itself": (lambda s: s, lambda p: p),
    "exp": (math.log, torch.exp),
    "over root": (lambda s: s / RIGHT, lambda p: p * RIGHT),
    "temperature": (lambda s: 1 / s, lambda p: 1 / p),
    "softplus": (lambda s: math.log(math.expm1(s)), functional.softplus),
}


class Attention(nn.Module):
    def __init__(self, scale: float, how: str = "itself", place: str = "q", each: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        start, self.scale = HOW[how]
        self.num_heads, self.place = HEADS, place
        self.weighting = nn.Parameter(torch.full((HEADS, 1, 1) if each else (1,), start(scale)))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scale = self.scale(self.weighting)
        if self.place == "q":
            out = functional.scaled_dot_product_attention(q * scale, k, v, scale=1.0)
        else:
            out = (q @ k.mT * scale).softmax(-1) @ v
        return self.o(out.transpose(1, 2).flatten(2))


def diagnosed(model: nn.Module) -> list[lh.Finding]:
    torch.manual_seed(1)
    with lh.watch(model, deep=True) as w:
        model(torch.randn(2, 16, WIDTH))
    return [f for f in lh.diagnose(w) if "scale" in f.kind]


def made(*args: object, **options: object) -> Attention:
    torch.manual_seed(0)
    return Attention(*args, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("place", ["q", "logits"])
@pytest.mark.parametrize("how", HOW)
def test_trained_away_from_its_start_it_is_a_note(how: str, place: str) -> None:
    for times in (0.37, 3.77):  # the second is near to no scale at all
        (found,) = diagnosed(made(RIGHT * times, how, place))
        assert found.severity == "note" and "learned parameter (weighting)" in found.why


def test_heads_apart_are_judged_each() -> None:
    model = made(RIGHT)
    with torch.no_grad():
        model.weighting.mul_(torch.tensor([0.45, 1.0, 1.8, 2.5]).reshape(HEADS, 1, 1))
    assert {f.severity for f in diagnosed(model)} == {"note"}


@pytest.mark.parametrize(("scale", "words"), [(1.0, "no scale at all"), (1 / D, "1/d_k")])
def test_a_wrong_start_is_a_warning_that_says_it_is_learned(scale: float, words: str) -> None:
    (found,) = diagnosed(made(scale, each=False))
    assert found.severity == "warning" and words in found.why
    assert "learned parameter (weighting), and starts there" in found.why


def test_a_right_start_is_silent() -> None:
    assert diagnosed(made(RIGHT, "exp")) == []


@pytest.mark.parametrize("times", [6.0, 0.15])
def test_far_outside_is_a_warning(times: float) -> None:
    (found,) = diagnosed(made(RIGHT * times))
    assert found.severity == "warning" and "further from 1/√d_k" in found.why


def test_a_constant_beside_another_parameter_is_judged_as_ever() -> None:
    model = made(RIGHT * 2.6)
    model.weighting.requires_grad_(False)
    model.gate = nn.Parameter(torch.full((HEADS,), 0.3))
    (found,) = diagnosed(model)
    assert found.severity == "warning" and "learned" not in found.why
