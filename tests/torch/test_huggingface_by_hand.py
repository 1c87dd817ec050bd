"""`use(model)` where a module writes attention out: it is followed, served, or computed as it is written."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import levelhead as lh
from levelhead.torch.huggingface import use

B, H, T, S, D = 2, 3, 5, 7, 4


def written(name: str) -> Callable[..., Any]:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        FORMULAS[name] = function
        return function

    return decorate


FORMULAS: dict[str, Callable[..., Any]] = {}
OTHERS: dict[str, Callable[..., Any]] = {}
BIAS = torch.randn(1, H, T, S, generator=torch.Generator().manual_seed(1))
HIDDEN = torch.zeros(B, 1, T, S, dtype=torch.bool)
HIDDEN[0, :, :, 5:] = True
HIDDEN[1, :, 2] = True  # a query that sees nothing


@written("scale after the product")
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul((q @ k.transpose(-1, -2) / math.sqrt(D)).softmax(-1), v)


@written("scale before, bias, fill with -1e9")
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q * D**-0.5, k.mT) + BIAS
    return torch.matmul(functional.softmax(scores.masked_fill(HIDDEN, -1e9), dim=-1), v)


@written("in place")
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, k.mT)
    scores *= 0.3
    scores += BIAS
    scores.masked_fill_(HIDDEN, torch.finfo(q.dtype).min)
    return torch.matmul(scores.softmax(-1), v)


@written("where, and a cast")
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.where(~HIDDEN, torch.matmul(q.float(), k.float().mT), torch.tensor(torch.finfo(q.dtype).min))
    return torch.matmul(torch.softmax(scores / 2, -1).to(v.dtype), v)


@written("additive mask with the lowest number")
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.zeros(HIDDEN.shape).masked_fill(HIDDEN, torch.finfo(torch.float32).min)
    return torch.matmul((torch.matmul(q, k.mT) + mask).softmax(-1), v)


@written("bias before the scale")
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(((torch.matmul(q, k.mT) + BIAS) * 0.5 - 1.0).softmax(-1), v)


@written("a scale per head")
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul((torch.matmul(q, k.mT) * torch.tensor([0.1, 1.0, 2.0]).view(H, 1, 1)).softmax(-1), v)


@written("heads in the batch, baddbmm and bmm")
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    flat = [x.reshape(B * H, -1, D) for x in (q, k, v)]
    bias = BIAS.expand(B, H, T, S).reshape(B * H, T, S)
    scores = bias.baddbmm(batch1=flat[0], batch2=flat[1].mT, beta=0.5, alpha=0.3).view(B, H, T, S)
    weights = scores.masked_fill(HIDDEN, -torch.inf if not bool(HIDDEN.all(-1).any()) else -1e30).softmax(-1)
    return torch.bmm(weights.view(B * H, T, S), flat[2]).view(B, H, T, D)


@written("einsum, sequence first")
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    first = [x.permute(2, 0, 1, 3) for x in (q, k, v)]
    weights = torch.softmax(torch.einsum("ibnd,jbnd->bnij", first[0], first[1]) * 0.4, dim=3)
    return torch.einsum("bnij,jbnd->ibnd", weights, first[2]).permute(1, 2, 0, 3)


@written("a mask of the scores' shape, and their type")
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, k.mT)
    scores.masked_fill_(HIDDEN.expand_as(scores), torch.finfo(scores.dtype).min)
    return torch.einsum("bhlt,bhtv->bhlv", [scores.float().softmax(-1).type_as(scores), v])


@written("not below the lowest number")
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    lowest = torch.finfo(q.dtype).min
    mask = torch.zeros(HIDDEN.shape).masked_fill(HIDDEN[:1], lowest) + torch.full((T, S), lowest).triu(3)
    return torch.matmul(torch.max(torch.matmul(q, k.mT) + mask, torch.tensor(lowest)).softmax(-1), v)


@written("hidden again after the softmax")
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.matmul(q, k.mT).masked_fill(HIDDEN, -1e30).softmax(-1)
    return torch.matmul(weights.masked_fill(HIDDEN, 0.0), v)


@written("content and position")
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, k.mT) + torch.matmul(q, k.flip(2).mT)
    return torch.matmul(scores.softmax(-1), v)


def _other(name: str) -> Callable[..., Any]:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        OTHERS[name] = function
        return function

    return decorate


@_other("softmax over queries")
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(torch.matmul(q, k.mT).softmax(-2), v)


@_other("weights changed after the softmax")
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(torch.matmul(q, k.mT).softmax(-1) * ~HIDDEN, v)


@_other("a cap")
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul((torch.tanh(torch.matmul(q, k.mT) / 2) * 2).softmax(-1), v)


@_other("a fill that does not hide")
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(torch.matmul(q, k.mT).masked_fill(HIDDEN, -3.0).softmax(-1), v)


@_other("a scale per key")
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul((torch.matmul(q, k.mT) * torch.linspace(0, 1, S)).softmax(-1), v)


class Attention(nn.Module):
    """Runs one of the formulas; `softmax` in its code is what the survey looks for."""

    def __init__(self, formula: Callable[..., Any]) -> None:
        super().__init__()
        self.formula = formula

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = self.formula(q, k, v)  # no softmax here, and yet it is one
        return out

    softmax = functional.softmax

    def normalised(self, x: Tensor) -> Tensor:
        return functional.softmax(x, -1)


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(B, H, n, D, generator=generator) for n in (T, S, S))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def learned(module: nn.Module) -> tuple[Tensor, tuple[Tensor, ...]]:
    inputs = qkv()
    out = module(*inputs)
    return out, torch.autograd.grad((out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum(), inputs)


@pytest.mark.parametrize("name", FORMULAS)
def test_written_out_attention_is_served(name: str) -> None:
    module = Attention(FORMULAS[name])
    wanted, wanted_gradients = learned(module)
    with use(module) as used:
        found, gradients = learned(module)
    assert used.calls == 1
    assert type(found) is Tensor
    assert not torch.equal(found, wanted)  # levelhead's own rounding
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
    # A query that sees nothing by an added number has gradients of its own in plain operations, which are noise.
    keep = 2 if name.startswith("additive") else 0
    for x, y in zip(gradients[keep:], wanted_gradients[keep:], strict=True):
        torch.testing.assert_close(x, y, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("name", OTHERS)
def test_another_formula_is_refused_or_computed_as_it_is(name: str) -> None:
    module = Attention(OTHERS[name])
    wanted, wanted_gradients = learned(module)
    with use(module), pytest.raises(lh.LevelheadError, match="Attention computing this call by another formula"):
        module(*qkv())
    with use(module, partial=True) as used:
        found, gradients = learned(module)
    assert used.calls == 0
    assert torch.equal(found, wanted)
    assert all(torch.equal(x, y) for x, y in zip(gradients, wanted_gradients, strict=True))


def test_dropout_is_applied_in_training_only() -> None:
    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = functional.dropout(torch.matmul(q, k.mT).softmax(-1), 0.5, training=module.training)
        return torch.matmul(weights, v)

    torch.manual_seed(0)
    module = Attention(formula).eval()
    q, k = torch.randn(1, 4, 64, 8), torch.randn(1, 4, 64, 8)
    with torch.no_grad(), use(module) as used:
        assert torch.allclose(module(q, k, torch.ones_like(k)), torch.ones(()), atol=1e-5)
        out = module.train()(q, k, torch.ones_like(k))
    assert used.calls == 2
    assert abs(float(out.mean()) - 1) < 0.05 < float(out.std())


def test_weights_that_are_returned_are_computed_when_they_are_read() -> None:
    def formula(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = torch.matmul(q, k.mT) / 2
        weights = scores.softmax(-1)
        return torch.matmul(weights, v), weights, scores

    module = Attention(formula)
    q, k, v = qkv()
    wanted = formula(q, k, v)
    with use(module):
        found = module(q, k, v)
    assert found[1].shape == (B, H, T, S) and found[1].dtype is torch.float32
    assert type(found[2]) is Tensor and torch.equal(found[2], wanted[2])
    assert torch.equal(found[1] + 0, wanted[1])
    (gradient,) = torch.autograd.grad((found[1] * BIAS).sum(), q)
    (wanted_gradient,) = torch.autograd.grad((wanted[1] * BIAS).sum(), q)
    assert torch.equal(gradient, wanted_gradient)


class Softmax(torch.autograd.Function):
    """A softmax of somebody's own, as SEW-D has one: torch passes it the scores as they are."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        weights = scores.softmax(-1)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (weights,) = ctx.saved_tensors
        return weights * (gradients[0] - (weights * gradients[0]).sum(-1, keepdim=True))


def test_gradients_are_not_lost_in_a_function_of_somebodys_own() -> None:
    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.matmul(Softmax.apply(torch.matmul(q, k.mT)), v)  # type: ignore[no-untyped-call]

    module = Attention(formula)
    with use(module), pytest.raises(lh.LevelheadError, match=r"torch\.autograd\.Function"):
        learned(module)
    with torch.no_grad(), use(module) as used:
        torch.testing.assert_close(module(*qkv()), formula(*qkv()))
    assert used.calls == 1


def test_weights_read_without_gradients_keep_them() -> None:
    def formula(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.matmul(q, k.mT).softmax(-1)
        return torch.matmul(weights, v), weights

    module, inputs = Attention(formula), qkv()
    with use(module):
        _, weights = module(*inputs)
    with torch.no_grad():
        shown = float(weights.max())
    (gradient,) = torch.autograd.grad((weights * BIAS).sum(), inputs[0])
    assert 0 < shown <= 1 and float(gradient.abs().max()) > 0


def test_an_output_may_be_written_into() -> None:
    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.matmul(torch.matmul(q, k.mT).softmax(-1), v)
        out += q
        return out

    module = Attention(formula)
    _, wanted = learned(module)
    with use(module):
        _, found = learned(module)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, atol=2e-6, rtol=1e-4)
