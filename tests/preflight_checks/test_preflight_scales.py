"""`lh.preflight`: scales inside a score_mod, and parameters that are no scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention

import levelhead as lh
from watched import one_thread  # noqa: F401

H, D = 4, 8


class Model(nn.Module):
    def __init__(self, middle: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.middle = nn.Embedding(40, H * D), middle
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(H * D, H * D) for _ in range(4))
        self.alpha = nn.Parameter(torch.zeros(1))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = (p(x).unflatten(-1, (H, D)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return x + self.o_proj(self.middle(q, k, v, self.alpha).transpose(1, 2).flatten(2))


def checked(middle: Callable[..., Tensor]) -> Any:
    model = Model(middle)
    result = lh.preflight(model, torch.randint(40, (3, 12), generator=torch.Generator().manual_seed(0)))
    assert not bool(model.alpha.any())
    return result


def flex(score_mod: Callable[..., Any]) -> Callable[..., Tensor]:
    return lambda q, k, v, alpha: flex_attention(q, k, v, score_mod=score_mod)


def test_a_score_mod_that_scales_again_is_named() -> None:
    result = checked(flex(lambda s, b, h, i, j: s * D**-0.5))
    assert (
        result.findings[0].kind == "wrong scale" and abs(result.findings[0].evidence["effective_scale"] - 1 / D) < 1e-3
    )


def test_a_score_mod_that_adds_or_caps_leaves_the_scale() -> None:
    for score_mod in (lambda s, b, h, i, j: s + (j - i) * 0.1, lambda s, b, h, i, j: 30 * torch.tanh(s / 30)):
        result = checked(flex(score_mod))
        assert result.passed and result["effective scale"].verdict == "passed"


def test_a_score_mod_with_many_slopes_is_not_judged() -> None:
    assert checked(flex(lambda s, b, h, i, j: s * (1 + j)))["effective scale"].verdict == "not judged"


def scaled(gate: bool) -> Callable[..., Tensor]:
    """No scale behind a gate of zero; or e^0 as a scale."""

    def middle(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
        logits = q @ k.mT if gate else q @ k.mT * alpha.exp()
        y = functional.softmax(logits, -1) @ v
        return alpha * y if gate else y

    return middle


def test_a_gate_of_zeros_is_no_learned_scale() -> None:
    gated, learned = (checked(scaled(gate)).findings[0] for gate in (True, False))
    assert gated.kind == learned.kind == "wrong scale"
    assert "alpha" not in gated.why and "learned parameter (alpha)" in learned.why
