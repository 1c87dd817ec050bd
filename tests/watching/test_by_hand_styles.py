"""Attention as well-known code writes it by hand: the statistics are those of the logits it really used."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, einsum, nn

import levelhead as lh
from watched import one_thread

__all__ = ["one_thread"]  # a fixture
C, H, D = 32, 4, 8


class Style(nn.Module):
    """`logits` (B, H, T, S): what the softmax really saw, -inf where a mask hides."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(C, C) for _ in range(4))
        self.num_heads = H
        self.logits = torch.empty(0)

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """(B, T, H, D) each."""
        return tuple(f(x).unflatten(-1, (H, D)) for f in (self.q, self.k, self.v))

    def used(self, logits: Tensor, hidden: Tensor | None = None) -> None:
        self.logits = logits.detach() if hidden is None else logits.detach().masked_fill(hidden, -math.inf)


class SetTransformer(Style):
    """Heads are cut from the columns and put before the batch."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.cat(f(x).split(D, 2), 0) for f in (self.q, self.k, self.v))
        scores = q.bmm(k.transpose(1, 2)) / math.sqrt(D)
        self.used(scores.unflatten(0, (H, -1)).transpose(0, 1))
        return torch.cat((q + torch.softmax(scores, 2).bmm(v)).split(len(x), 0), 2)


class MultiQuery(Style):
    """Rows of the product are tokens and heads, as one matrix."""

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        k, v = self.k(x)[..., :D], self.v(x)[..., :D]
        empty = torch.empty(B, T * H, T)
        scores = torch.baddbmm(empty, self.q(x).view(B, T * H, D), k.mT, beta=0, alpha=D**-0.5).view(B, T, H, T)
        hidden = torch.ones(T, T).triu(1).bool()[:, None]
        self.used(scores.transpose(1, 2), hidden.transpose(0, 1))
        weights = torch.where(hidden, torch.full([], -1e4), scores).softmax(-1)
        return torch.bmm(weights.view(B, T * H, T), v).view(B, T, C)


class Latent(Style):
    """Two products are added: one with keys of every head, one with a key that heads share."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        scores = einsum("bshr,btr->bsht", q[..., 4:], k[:, :, 0, 4:]) + einsum(
            "bshd,bthd->bsht", q[..., :4], k[..., :4]
        )
        mask = torch.full((x.shape[1],) * 2, -math.inf).triu_(1)
        scores = scores * D**-0.5 + mask.unsqueeze(1)
        self.used(scores.transpose(1, 2))
        return einsum("bsht,bthd->bshd", scores.softmax(-1), v).flatten(2)


class Shifted(Style):
    """Transformer-XL: sequence first, and scores of relative positions that are shifted by a reshape."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.transpose(0, 1) for y in self.heads(x))  # (T, B, H, D)
        T, B = q.shape[:2]
        positions = self.o(torch.linspace(-1, 1, T * C).view(T, C)).view(T, H, D)
        relative = einsum("ibnd,jnd->ijbn", q, positions)
        relative = torch.cat([torch.zeros(T, 1, B, H), relative], 1).view(T + 1, T, B, H)[1:].view_as(relative)
        scores = (relative + einsum("ibnd,jbnd->ijbn", q, k)) * D**-0.5
        hidden = torch.ones(T, T).triu(1).bool()[:, :, None, None]
        self.used(scores.permute(2, 3, 0, 1), hidden.permute(2, 3, 0, 1))
        return einsum("ijbn,jbnd->ibnd", scores.masked_fill(hidden, -1e30).softmax(1), v)


class Chunks(Style):
    """Every chunk of tokens sees itself and the chunk before."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(1, (-1, 4)) for y in self.heads(x))  # (B, n, 4, H, D)
        k, v = (torch.cat([nn.functional.pad(y, (0,) * 6 + (1, 0))[:, :-1], y], 2) for y in (k, v))
        scores = einsum("bnihd,bnjhd->bnhij", q, k) * D**-0.5
        hidden = torch.zeros(q.shape[1], 1, 4, 8, dtype=torch.bool)
        hidden[0, ..., :4] = True
        self.used(scores.flatten(0, 1), hidden.repeat(len(x), 1, 1, 1))
        return einsum("bnhij,bnjhd->bnihd", scores.masked_fill(hidden, -1e4).softmax(-1), v)


class Scattered(Style):
    """The largest scores only, written into a tensor of -inf."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.transpose(1, 2) for y in self.heads(x))
        best, place = (q @ k.mT * D**-0.5).topk(3, dim=-1)
        scores = torch.full((*best.shape[:3], x.shape[1]), -math.inf).scatter_(-1, place, best)
        self.used(scores)
        return scores.softmax(-1) @ v


class Mixed(Style):
    """Talking heads by a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(H, H), nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.transpose(1, 2) for y in self.heads(x))
        scores = self.before((q @ k.mT * D**-0.5).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        self.used(scores)
        return self.after(scores.softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2) @ v


class BesideAColumn(Style):
    """A learned logit for nothing, of every head: its weight is no key's, and H/ln n counts it as one."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.transpose(1, 2) for y in self.heads(x))
        column = torch.linspace(-1, 1, H).view(1, H, 1, 1).expand(len(x), -1, x.shape[1], 1)
        scores = torch.cat([q @ k.mT * D**-0.5, column], -1)
        self.used(scores)
        return scores.softmax(-1)[..., :-1] @ v


FOLLOWED = [SetTransformer, MultiQuery, Latent, Shifted, Chunks, BesideAColumn]
STYLES = [(kind, 2, 8) for kind in (*FOLLOWED, Scattered, Mixed)] + [(kind, 4, 4) for kind in FOLLOWED]


@pytest.mark.parametrize(("kind", "B", "T"), STYLES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_the_statistics_are_those_of_the_logits(kind: type[Style], B: int, T: int) -> None:
    torch.manual_seed(0)
    model, x = kind(), 2 * torch.randn(B, T, C)
    with torch.no_grad():
        plain = model(x)
        with lh.watch(model, deep=True) as w:
            assert torch.equal(model(x), plain)
    (line,) = w.coverage()
    assert line.seen and not line.note
    heads, logits = w.last[""].heads, model.logits.double()
    weights, count = logits.softmax(-1), (logits > -math.inf).sum(-1)
    entropy = -torch.special.xlogy(weights, weights).sum(-1)
    assert heads.rows.tolist() == [logits.shape[0] * logits.shape[2]] * H
    np.testing.assert_allclose(heads.mean_entropy, entropy.mean((0, 2)), rtol=1e-4)
    several = (count > 1).expand_as(entropy)
    level = torch.where(several, entropy / count.clamp(min=2).log(), 0.0).sum((0, 2)) / several.sum((0, 2))
    np.testing.assert_allclose(heads.normalised_entropy, level, rtol=1e-4)
    if kind is not BesideAColumn:
        np.testing.assert_allclose(heads.max_logit, logits.amax((0, 2, 3)), rtol=1e-4)
        np.testing.assert_allclose(heads.mean_top1, weights.amax(-1).mean((0, 2)), rtol=1e-4)
