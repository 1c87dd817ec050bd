"""Heads of `scaled_dot_product_attention` calls that are not (B, H, T, D), and of query rows that heads share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import levelhead as lh
from levelhead.watching.head_axes import TOGETHER
from watched import one_thread

__all__ = ["one_thread"]  # a fixture
B, T, H, D = 2, 8, 6, 5
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def _sdpa(*qkv: Tensor, **options: object) -> Tensor:
    return functional.scaled_dot_product_attention(*qkv, **options)  # type: ignore[arg-type]


class Model(nn.Module):
    """Attends by `attend`, which gets q (B, H, T, D), k and v (B, G, T, D)."""

    def __init__(self, attend: Attend, groups: int = H, heads: int | None = None, norm: bool = False) -> None:
        super().__init__()
        self.attend = attend
        self.q, self.k, self.v = (nn.Linear(H * D, n * D) for n in (H, groups, groups))
        self.norm = nn.LayerNorm(D) if norm else None
        if heads is not None:
            self.num_heads = heads
        with torch.no_grad():
            self.q.weight[:D] *= 4
            self.q.weight[-D:] *= 0.2

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, D)).transpose(-3, -2) for f in (self.q, self.k, self.v))
        if self.norm is not None:
            q, k = self.norm(q), self.norm(k)
        self.projected = (q, k, v)
        for x in self.projected:
            x.retain_grad()
        shared = k.repeat_interleave(H // k.shape[-3], -3)
        self.logits = (q @ shared.mT / D**0.5).detach()
        return self.attend(q, k, v)


def _watched(model: Model, *shape: int, **options: object) -> lh.Watch:
    with lh.watch(model, **options) as w:  # type: ignore[arg-type]
        model(torch.randn(*(shape or (B, T)), H * D)).square().sum().backward()
    return w


def _folded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _sdpa(*(x.flatten(0, 1) for x in (q, k, v)))


def _heads_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _sdpa(*(x.transpose(0, 1).flatten(0, 1) for x in (q, k, v)))


def _blocks(order: tuple[int, ...]) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _sdpa(*(x.unflatten(2, (2, 4)).permute(*order) for x in (q, k, v)))

    return attend


def _rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q.reshape(len(q), k.shape[1], -1, D) @ k.mT / D**0.5).softmax(-1) @ v


@pytest.mark.parametrize("heads", [None, H], ids=["unknown", "known"])
@pytest.mark.parametrize("attend", [_folded, _heads_first])
@pytest.mark.parametrize("batch", [1, B, H])
def test_heads_in_the_batch(attend: Attend, batch: int, heads: int | None) -> None:
    model = Model(attend, heads=heads)
    w = _watched(model, batch, T, gradients=True)
    assert w.coverage()[0].note == ""
    got = w.last[""].heads
    np.testing.assert_allclose(got.max_logit, model.logits.amax((0, 2, 3)), rtol=1e-4)
    for name, projected in zip(("dq", "dk", "dv"), model.projected, strict=True):
        assert projected.grad is not None
        wanted = projected.grad.square().sum((0, 2, 3)).sqrt()
        np.testing.assert_allclose(getattr(got, f"{name}_norm"), wanted, rtol=1e-4)


# Blocks of neighbours, and of every second token; heads before and after the blocks.
@pytest.mark.parametrize("heads", [None, H], ids=["unknown", "known"])
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (0, 2, 1, 3, 4), (0, 1, 3, 2, 4), (0, 3, 1, 2, 4)])
def test_heads_beside_blocks(order: tuple[int, ...], heads: int | None) -> None:
    model = Model(_blocks(order), heads=heads)
    w = _watched(model)
    blocks = model.logits.unflatten(3, (2, 4)).unflatten(2, (2, 4))  # (B, H, block, t, block, s)
    tokens = order.index(3) == 3
    own = torch.eye(2).bool()[:, None, :, None] if tokens else torch.eye(4).bool()[None, :, None, :]
    expected = blocks.masked_fill(~own, -torch.inf).amax((0, 2, 3, 4, 5))
    assert w.coverage()[0].note == ""
    np.testing.assert_allclose(w.last[""].heads.max_logit, expected, rtol=1e-4)


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_heads_in_the_rows_of_shared_keys(groups: int) -> None:
    model = Model(_rows, groups)
    w = _watched(model, deep=True)
    assert w.coverage()[0].note == ""
    np.testing.assert_allclose(w.last[""].heads.max_logit, model.logits.amax((0, 2, 3)), rtol=1e-4)


def _one_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _sdpa(*(x.flatten(0, 1)[None] for x in (q, k, v)))


def _one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _sdpa(*(x.flatten(0, 1)[:, None] for x in (q, k, v)))


def _turned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _sdpa(*(x.transpose(0, 1) for x in (q, k, v)))


def _shared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _sdpa(q.reshape(len(q), k.shape[1], -1, D), k, v)


@pytest.mark.parametrize("attend", [_one_batch, _one_head, _turned, _shared])
def test_four_axes_that_are_other_ones(attend: Attend) -> None:
    model = Model(attend, 2 if attend is _shared else H)
    w = _watched(model)
    assert w.coverage()[0].note == ""
    np.testing.assert_allclose(w.last[""].heads.max_logit, model.logits.amax((0, 2, 3)), rtol=1e-4)


def test_windows_in_the_batch_and_confused_axes_stay_as_they_are() -> None:
    def windows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _sdpa(*(x.unflatten(2, (2, 4)).transpose(1, 2).flatten(0, 1) for x in (q, k, v)))

    def confused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _sdpa(*(x.transpose(1, 2) for x in (q, k, v)))

    for attend, heads in ((windows, H), (confused, 2 * H)):
        w = _watched(Model(attend), B, 2 * H if attend is confused else T)
        assert (len(w.last[""].heads.max_logit), w.coverage()[0].note) == (heads, "")


def test_no_batch() -> None:
    model = Model(_sdpa)
    w = _watched(model, T)
    assert w.coverage()[0].note == ""
    np.testing.assert_allclose(w.last[""].heads.max_logit, model.logits.amax((1, 2)), rtol=1e-4)


def test_a_batch_as_large_as_the_number_of_heads_is_no_head() -> None:
    def first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _sdpa(q[:, 0], k[:, 0], v[:, 0])

    model = Model(first, heads=H)
    w = _watched(model, H, T)
    np.testing.assert_allclose(w.last[""].heads.max_logit, [model.logits[:, 0].max()], rtol=1e-4)


def test_masks_go_with_their_heads() -> None:
    mask = torch.randn(B * H, T, T).tril() > 0

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _sdpa(*(x.transpose(0, 1).flatten(0, 1) for x in (q, k, v)), attn_mask=mask | torch.eye(T).bool())

    model = Model(attend)
    w = _watched(model)
    shown = (mask | torch.eye(T).bool()).unflatten(0, (H, B)).transpose(0, 1)
    expected = model.logits.masked_fill(~shown, -torch.inf).amax((0, 2, 3))
    np.testing.assert_allclose(w.last[""].heads.max_logit, expected, rtol=1e-4)


def _with_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _sdpa(*(x.unflatten(2, (2, 4)).flatten(1, 2) for x in (q, k, v)))


@pytest.mark.parametrize("attend", [_folded, _heads_first, _blocks((0, 1, 2, 3, 4)), _rows, _with_blocks])
def test_heads_that_cannot_be_known_are_named(attend: Attend) -> None:
    """A norm of every head hides which columns they were."""
    model = Model(attend, groups=2 if attend is _rows else H, norm=True)
    w = _watched(model, deep=True)
    assert TOGETHER in w.coverage()[0].note
    assert len(w.last[""].heads.max_logit) == 1


def test_a_compiled_model() -> None:
    model = Model(_heads_first)
    x = torch.randn(B, T, H * D)
    compiled = torch.compile(model, backend="eager")
    with lh.watch(compiled) as w:
        compiled(x)
    model(x)
    np.testing.assert_allclose(w.last.records[0].heads.max_logit, model.logits.amax((0, 2, 3)), rtol=1e-4)


def test_levelhead_in_place_of_torch() -> None:
    model = Model(_heads_first)
    with lh.torch.patch():
        w = _watched(model)
    np.testing.assert_allclose(w.last[""].heads.max_logit, model.logits.amax((0, 2, 3)), rtol=1e-4)


def test_grouped_heads_of_five_axes_are_counted() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _sdpa(q[:, None], k[:, None], v[:, None], enable_gqa=True)[:, 0]

    w = _watched(Model(attend, groups=2))
    assert w.last[""].facts.kv_heads == 2 and len(w.last[""].heads.max_logit) == H
