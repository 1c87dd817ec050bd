"""Which axis of hand-written scores is heads, in every layout, and also where the batch is as large."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import levelhead as lh
from levelhead.watching.head_axes import TOGETHER
from watched import one_thread

__all__ = ["one_thread"]  # a fixture
WIDTH, HEADS, D = 16, 4, 4

LAYOUTS = "bhts hbts btsh tsbh bths thbs flat-bh flat-hb bngts stacked"


class Laid(nn.Module):
    """Scores in a layout of their own; `logits` (B, H, T, S) are what they are. Grouped ones have two heads a key."""

    def __init__(self, layout: str, told: bool, *, lost: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.layout = layout
        self.seen = _unknown if lost else _as_it_is
        if told:
            self.num_heads = HEADS

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, D)) for f in (self.q, self.k, self.v))  # (B, T, H, D)
        q = q / 2
        if self.layout in ("bngts", "stacked"):
            k, v = k[:, :, ::2], v[:, :, ::2]
            grouped = q.unflatten(2, (2, 2))
            self.logits = torch.einsum("btngd,bsnd->bngts", grouped, k).flatten(1, 2).detach()
            if self.layout == "bngts":
                scores = torch.einsum("btngd,bsnd->bngts", grouped, k)
                return torch.einsum("bngts,bsnd->btngd", scores.softmax(-1), v)
            rows = grouped.permute(0, 2, 3, 1, 4).flatten(2, 3)  # (B, N, g T, D)
            return self.seen(rows @ k.permute(0, 2, 3, 1)).softmax(-1) @ v.transpose(1, 2)
        self.logits = torch.einsum("bthd,bshd->bhts", q, k).detach()
        if self.layout.startswith("flat"):
            order = (0, 2, 1, 3) if self.layout == "flat-bh" else (2, 0, 1, 3)
            q, k, v = (y.permute(order).flatten(0, 1) for y in (q, k, v))
            return torch.bmm(torch.bmm(q, k.mT).softmax(-1), v)
        scores = torch.einsum(f"bthd,bshd->{self.layout}", q, k)
        return torch.einsum(f"{self.layout},bshd->bthd", self.seen(scores).softmax(self.layout.index("s")), v)


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _unknown(x: Tensor) -> Tensor:
    """The same numbers, by an operator without a rule."""
    return torch.addcmul(torch.zeros(()), x, torch.ones(1))


@pytest.mark.parametrize("told", [True, False], ids=["number told", "not told"])
@pytest.mark.parametrize("layout", LAYOUTS.split())
def test_heads_are_told_apart_in_every_layout(layout: str, told: bool) -> None:
    for B, T in ((4, 4), (2, 6)):
        torch.manual_seed(0)
        model = Laid(layout, told)
        with torch.no_grad(), lh.watch(model, deep=True) as w:
            model(3 * torch.randn(B, T, WIDTH))
        assert w.coverage()[0].note == ""
        np.testing.assert_allclose(w.last[""].heads.max_logit, model.logits.amax((0, 2, 3)), rtol=1e-4)
        np.testing.assert_allclose(w.last[""].heads.var_logit, model.logits.var(-1, correction=0).mean((0, 2)), 1e-4)


@pytest.mark.parametrize("told", [True, False], ids=["number told", "not told"])
@pytest.mark.parametrize("layout", ["bhts", "bths", "stacked"])
def test_heads_are_told_apart_after_an_operator_that_is_not_followed(layout: str, told: bool) -> None:
    for B, T in ((4, 4), (4, 6), (2, 4)):  # as many as heads
        torch.manual_seed(0)
        model = Laid(layout, told, lost=True)
        with torch.no_grad(), lh.watch(model, deep=True) as w:
            model(3 * torch.randn(B, T, WIDTH))
        assert w.coverage()[0].note == ""
        np.testing.assert_allclose(w.last[""].heads.max_logit, model.logits.amax((0, 2, 3)), rtol=1e-4)


@pytest.mark.parametrize(("B", "T"), [(4, 6), (2, 4), (4, 4)])
def test_one_head_after_the_other_is_no_axis_of_heads(B: int, T: int) -> None:
    class Loop(Laid):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (f(x).split(D, -1) for f in (self.q, self.k, self.v))
            return torch.cat([_unknown(q[h] @ k[h].mT).softmax(-1) @ v[h] for h in range(HEADS)], -1)

    model = Loop("bhts", told=True)
    with torch.no_grad(), lh.watch(model, deep=True) as w:
        model(torch.randn(B, T, WIDTH))
    assert w.last[""].heads.rows.tolist() == [HEADS * B * T]
    assert "heads in a loop cannot be told apart" in w.coverage()[0].note


def test_a_batch_that_was_padded_is_measured() -> None:
    class Padded(Laid):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (f(x).unflatten(-1, (HEADS, D)).transpose(1, 2) for f in (self.q, self.k, self.v))
            self.logits = nn.functional.pad(q @ k.mT, (0, 0) * 3 + (0, 2)).transpose(1, 2)
            return self.logits.softmax(-1).transpose(1, 2)[: len(x)] @ v

    model = Padded("bhts", told=True)
    with torch.no_grad(), lh.watch(model, deep=True) as w:
        model(torch.randn(2, 6, WIDTH))
    assert w.coverage()[0].note == TOGETHER
    np.testing.assert_allclose(w.last[""].heads.max_logit, model.logits.max(), rtol=1e-5)


class Columns(nn.Module):
    """Attends within the columns of a grid whose rows lie together; `mixed`: no layer has tokens in this order."""

    def __init__(self, mixed: bool) -> None:
        super().__init__()
        self.order = torch.randperm(12) if mixed else torch.arange(12)
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.num_heads = HEADS

    def forward(self, x: Tensor) -> Tensor:
        q, k = (f(x)[:, self.order].unflatten(-1, (HEADS, D)).unflatten(1, (-1, HEADS)) for f in (self.q, self.k))
        self.logits = torch.einsum("btrhd,bsrhd->bhrts", q, k)
        return torch.einsum("bhrts,bsrhd->btrhd", self.logits.softmax(-1), k)


def test_heads_that_cannot_be_told_apart_are_together_and_the_coverage_says_so() -> None:
    torch.manual_seed(0)
    model = Columns(mixed=True)
    with torch.no_grad(), lh.watch(model, deep=True) as w:
        model(torch.randn(2, 12, WIDTH))
    assert TOGETHER in w.coverage()[0].note
    heads = w.last[""].heads
    assert heads.max_logit.shape == (1,)
    np.testing.assert_allclose(heads.max_logit, model.logits.max(), rtol=1e-5)
    assert heads.rows[0] == 2 * 12 * HEADS


def test_heads_beside_the_columns_of_a_grid() -> None:
    model = Columns(mixed=False)
    with torch.no_grad(), lh.watch(model, deep=True) as w:
        model(torch.randn(2, 12, WIDTH))
    assert w.coverage()[0].note == ""
    np.testing.assert_allclose(w.last[""].heads.max_logit, model.logits.amax((0, 2, 3, 4)), rtol=1e-4)


class Joined(nn.Module):
    """Scores of some heads beside those of others, which may be scaled by numbers of their own."""

    def __init__(self, scales: tuple[float, float] = (0.5, 0.5), *, lost: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scales, self.seen = scales, _unknown if lost else _as_it_is

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, D)).transpose(1, 2) for f in (self.q, self.k, self.v))
        parts = zip((slice(0, 1), slice(1, HEADS)), self.scales, strict=True)
        scores = torch.cat([self.seen(q[:, part] @ k[:, part].mT * scale) for part, scale in parts], 1)
        self.logits = scores.detach()
        return scores.softmax(-1) @ v


@pytest.mark.parametrize("B", [1, 2, 3, 4, 5])
def test_heads_that_were_joined_are_told_apart(B: int) -> None:
    torch.manual_seed(B)
    model = Joined()
    with lh.watch(model) as w:
        model(torch.randn(B, 7, WIDTH))
    np.testing.assert_allclose(w.last.records[0].heads.max_logit, model.logits.amax((0, 2, 3)), rtol=1e-5)
    assert w.last.records[0].facts.effective_scale == pytest.approx(0.5)
    assert not w.coverage()[0].note


def test_heads_that_were_joined_have_scales_of_their_own() -> None:
    torch.manual_seed(0)
    model = Joined((0.5, 0.25))
    with lh.watch(model) as w:
        model(torch.randn(2, 7, WIDTH))
    assert w.last.records[0].facts.effective_scales == pytest.approx((0.5, 0.25, 0.25, 0.25))


@pytest.mark.parametrize("B", [1, 2, 3, 4])
def test_a_batch_as_large_as_a_part_of_the_heads_is_not_taken_for_them(B: int) -> None:
    torch.manual_seed(B)
    model = Joined(lost=True)
    with lh.watch(model) as w:
        model(torch.randn(B, 7, WIDTH))
    (found,) = w.last.records[0].heads.max_logit
    assert found == pytest.approx(float(model.logits.max()))
    assert TOGETHER in w.coverage()[0].note
