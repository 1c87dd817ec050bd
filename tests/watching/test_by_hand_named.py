"""Attention by hand that is lost on its way is described or named; what is no attention is neither."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import levelhead as lh
from levelhead.watching.by_hand import IN_SEGMENTS, NO_PRODUCT, NO_SOFTMAX, OVERWRITTEN
from levelhead.watching.hand_softmax import GRADIENTS
from levelhead.watching.hand_weights import MASKED
from watched import BATCH, HEADS, TOKENS, WIDTH, batch, hidden, one_thread, outcome, same, stack

__all__ = ["one_thread"]  # a fixture
Attend = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]
D = WIDTH // HEADS
LOGITS: list[Tensor] = []  # (B, H, T, S) that the model really used


def used(logits: Tensor) -> Tensor:
    LOGITS.append(logits.detach())
    return logits


def watched(attend: Attend) -> Any:
    model = stack(attend, depth=1)
    plain = outcome(model, lambda: model(batch()))
    LOGITS.clear()
    with lh.watch(model, deep=True) as w:
        same(plain, outcome(model, lambda: model(batch())))
    return w


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / math.sqrt(q.shape[-1])


def right(w: Any, logits: Tensor) -> None:
    """The statistics are those of these logits, (B, H, T, S)."""
    x = logits.double()
    weights = x.softmax(-1)
    heads = w.last["blocks.0.attn"].heads
    seen = x.masked_fill(x == -math.inf, math.nan)
    np.testing.assert_allclose(heads.max_logit, x.amax((0, 2, 3)), rtol=1e-4)
    np.testing.assert_allclose(heads.min_logit, np.nanmin(seen.numpy(), (0, 2, 3)), rtol=1e-4)
    entropy = -torch.special.xlogy(weights, weights).sum(-1).mean((0, 2))
    np.testing.assert_allclose(heads.mean_entropy, entropy, rtol=1e-4)
    np.testing.assert_allclose(heads.mean_top1, weights.amax(-1).mean((0, 2)), rtol=1e-4)


# ---- described


def stacked(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return used(torch.stack([scores(q[:, h], k[:, h]) for h in range(HEADS)], 1)).softmax(-1) @ v


def written(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = torch.empty(BATCH, HEADS, TOKENS, TOKENS)
    for h in range(HEADS):
        logits[:, h] = scores(q[:, h], k[:, h])
    return used(logits).softmax(-1) @ v


def copied(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = torch.empty(BATCH, HEADS, TOKENS, TOKENS)
    logits.copy_(scores(q, k))
    return used(logits).softmax(-1) @ v


def chosen_rows(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (used(scores(q, k)[:, :, [0, 2, 4, 6, 8]]).softmax(-1) @ v).repeat(1, 1, 2, 1)


def beside_a_learned_key(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    memory = module.out_proj.weight[:2].reshape(1, HEADS, 2, D)  # type: ignore[union-attr,index]
    logits = torch.cat([scores(q, memory), scores(q, k)], -1)
    return used(logits).softmax(-1) @ torch.cat([memory.expand(BATCH, -1, -1, -1), v], 2)


def column_of_its_own_for_every_query(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return used(torch.cat([scores(q, k), q.mean(-1, keepdim=True)], -1)).softmax(-1)[..., :-1] @ v


def largest_only(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits, keys = scores(q, k).topk(3, -1)
    values = v[:, :, None].expand(-1, -1, TOKENS, -1, -1).gather(3, keys[..., None].expand(-1, -1, -1, -1, D))
    return (used(logits).softmax(-1)[..., None, :] @ values).squeeze(-2)


def masked_after_and_normalised(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = scores(q, k)
    used(logits.masked_fill(hidden(TOKENS), -math.inf))
    weights = logits.softmax(-1) * ~hidden(TOKENS)
    return weights / weights.sum(-1, keepdim=True) @ v


def rolled(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return used(scores(q, k).masked_fill(hidden(TOKENS), -math.inf).roll(1, -1)).softmax(-1) @ v.roll(1, 2)


def relative_first(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    positions = torch.linspace(-1, 1, TOKENS * TOKENS * D).sin().view(TOKENS, TOKENS, D)
    relative = torch.einsum("bhtd,tsd->bhts", q, positions)
    return used((relative + q @ k.mT) / math.sqrt(D)).softmax(-1) @ v


DESCRIBED = [
    stacked,
    written,
    copied,
    chosen_rows,
    beside_a_learned_key,
    column_of_its_own_for_every_query,
    largest_only,
    masked_after_and_normalised,
    rolled,
    relative_first,
]


@pytest.mark.parametrize("attend", DESCRIBED, ids=lambda f: f.__name__)
def test_logits_are_described_as_they_are(attend: Attend) -> None:
    w = watched(attend)
    (line,) = w.coverage()
    assert line.seen and not line.note
    right(w, LOGITS[0])


@pytest.mark.parametrize("attend", [stacked, written, largest_only], ids=lambda f: f.__name__)
def test_a_second_attention_of_a_module_is_not_lost(attend: Attend) -> None:
    w = watched(lambda m, q, k, v: attend(m, 100 * q, k, v) + scores(q, k).softmax(-1) @ v)
    assert w.coverage()[0].calls == 2
    np.testing.assert_allclose(w.last["blocks.0.attn"].heads.max_logit, LOGITS[0].amax((0, 2, 3)), rtol=1e-4)


# ---- named


def additive(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.tanh(q[:, :, :, None] + k[:, :, None]).sum(-1).softmax(-1) @ v


def of_pairs(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    each = q.sum(-1, keepdim=True) + k.sum(-1)[..., None, :]
    return nn.functional.leaky_relu(each).softmax(-1) @ v


def elementwise(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q[:, :, :, None] * k[:, :, None]).sum(-1).softmax(-1) @ v


def distances(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (-torch.cdist(q, k)).log_softmax(-1).exp() @ v


@pytest.mark.parametrize("attend", [additive, of_pairs, elementwise, distances], ids=lambda f: f.__name__)
def test_scores_that_are_no_product_are_named(attend: Attend) -> None:
    (line,) = watched(attend).coverage()
    assert not line.seen and NO_PRODUCT in line.how
    both = watched(lambda m, q, k, v: attend(m, q, k, v) + scores(q, k).softmax(-1) @ v)
    assert both.coverage()[0].seen and NO_PRODUCT in both.coverage()[0].note


def test_a_squared_relu_is_named() -> None:
    (line,) = watched(lambda m, q, k, v: scores(q, k).relu().square() @ v).coverage()
    assert NO_SOFTMAX in line.how


def test_a_mask_after_the_softmax_is_named() -> None:
    (line,) = watched(lambda m, q, k, v: (scores(q, k).softmax(-1) * ~hidden(TOKENS)) @ v).coverage()
    assert line.seen and MASKED in line.note


def one_score_at_a_time(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2).flatten(2) for x in (q, k, v))
    layer = module.out_proj
    each = [layer(torch.tanh(q[:, -1] + k[:, t]))[:, :1].squeeze(-1) for t in range(TOKENS)]
    out = torch.bmm(torch.stack(each, 1).softmax(1)[:, None], v)
    return out.expand(-1, TOKENS, -1).unflatten(-1, (HEADS, -1)).transpose(1, 2)


def by_column(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weight = module.out_proj.weight[:D, :D]  # type: ignore[union-attr,index]
    each = nn.functional.linear((q[:, :, :, None] - k[:, :, None]).relu(), weight)
    return (each.softmax(-2) * v[:, :, None].expand_as(each)).sum(-2)


def over_edges(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    to, from_ = torch.cartesian_prod(torch.arange(TOKENS), torch.arange(TOKENS)).T
    q, k, v = (x.permute(2, 0, 1, 3) for x in (q, k, v))
    raised = (q[to] * k[from_]).sum(-1).exp()
    sums = torch.zeros(TOKENS, BATCH, HEADS).index_add(0, to, raised)
    weights = raised / sums[to]
    return torch.zeros(TOKENS, BATCH, HEADS, D).index_add(0, to, weights[..., None] * v[from_]).permute(1, 2, 0, 3)


@pytest.mark.parametrize(
    ("attend", "words"),
    [(one_score_at_a_time, NO_PRODUCT), (by_column, NO_PRODUCT), (over_edges, IN_SEGMENTS)],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_other_softmaxes_over_keys_are_named(attend: Attend, words: str) -> None:
    (line,) = watched(attend).coverage()
    assert not line.seen and words in line.how


@pytest.mark.parametrize("kind", ["out", "in place"])
def test_logits_that_the_softmax_overwrites_are_named_and_not_misread(kind: str) -> None:
    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = scores(q, k)
        if kind == "out":
            return torch.softmax(logits, -1, out=logits) @ v
        logits -= logits.amax(-1, keepdim=True)
        logits.exp_()
        logits /= logits.sum(-1, keepdim=True)
        return logits @ v

    model = stack(attend, depth=1)
    with torch.no_grad(), lh.watch(model, deep=True) as w:
        model(batch())
    assert not w.last.records
    assert OVERWRITTEN in w.coverage()[0].how


def test_gradients_of_a_softmax_by_hand_are_named() -> None:
    model = stack(lambda m, q, k, v: scores(q, k).softmax(-1) @ v, depth=1)
    with lh.watch(model, deep=True, gradients=True) as w:
        model(batch()).sum().backward()
    assert GRADIENTS in w.coverage()[0].note


# ---- neither


class Gates(nn.Module):
    """Softmaxes over columns of layers, applied by products, after attention and without it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 10)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        each = torch.stack([branch(x) for branch in self.branches], 2)
        best, chosen = self.gate(x).topk(2, -1)
        picked = each.gather(2, chosen[..., None].expand(-1, -1, -1, WIDTH))
        x = x + (best.softmax(-1)[..., None, :] @ picked).squeeze(2)
        x = x + torch.einsum("bte,bted->btd", (self.gate(x) / 2).log_softmax(-1).exp(), each)
        heads = self.gate(x).unflatten(-1, (2, 2)).softmax(-1)
        x = x + torch.einsum("btgm,btgmd->btd", heads, each.unflatten(2, (2, 2)))
        logits = self.gate(x)
        raised = (logits - logits.amax(-1, keepdim=True)).exp()
        x = x + torch.einsum("bte,bted->btd", raised / raised.sum(-1, keepdim=True), each)
        x = x + (each * torch.stack([branch(x) for branch in self.branches], 2).softmax(2)).sum(2)
        kernels = self.gate(x).reshape(-1, 2, 1).softmax(1)  # of a convolution
        x = x + (each.reshape(len(kernels), -1, 2) @ kernels).reshape(*x.shape[:2], -1).mean(-1, keepdim=True)
        product = x @ x.mT
        x = x + (torch.sigmoid(product) * product.tanh()) @ x  # a gate
        probabilities = self.out(x).softmax(-1)
        return probabilities @ self.out.weight


def test_gates_are_not_named() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Gates(), stack(lambda m, q, k, v: scores(q, k).softmax(-1) @ v, depth=1), Gates())
    with lh.watch(model, deep=True) as w:
        model(batch())
    assert [(line.module, line.note) for line in w.coverage()] == [("1.blocks.0.attn", "")]


# ---- modes of the user


class Noise(TorchDispatchMode):
    """Draws random numbers whenever something is divided."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out + 1e-3 * torch.randn(out.shape) if func is torch.ops.aten.div.Tensor else out


def test_a_mode_that_draws_random_numbers_does_not_see_the_measurement() -> None:
    model = stack(lambda m, q, k, v: scores(q, k).softmax(-1) @ v, depth=2)
    with Noise():
        plain = outcome(model, lambda: model(batch()), learns=False)
    with lh.watch(model, deep=True) as w, Noise():
        same(plain, outcome(model, lambda: model(batch()), learns=False))
    assert len(w.last.records) == 2
