"""A softmax does not notice a shift of its rows; the logits are those before the shift. Other forms of a softmax."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from test_by_hand_named import LOGITS, right, scores, used, watched
from torch import Tensor, nn

import levelhead as lh
from levelhead.watching.by_hand import NO_PRODUCT
from watched import BATCH, HEADS, TOKENS, batch, hidden, one_thread, stack

__all__ = ["one_thread"]  # a fixture


def largest_in_place(z: Tensor) -> Tensor:
    z = z.clone()
    return z.sub_(z.detach().amax(-1, keepdim=True)).softmax(-1)


def then_masked_and_cast(z: Tensor) -> Tensor:
    row = z.detach().max(-1).values[..., None]
    return (z - row).masked_fill(hidden(TOKENS), -math.inf).double().softmax(-1).float()


def then_scaled_and_viewed(z: Tensor) -> Tensor:
    z = z * 4
    return ((z - z.amax(-1, keepdim=True)) / 4).flatten(0, 1).softmax(-1).view(z.shape)


def guarded(z: Tensor) -> Tensor:
    """As code does that has rows without a visible key."""
    row = z.amax(-1, keepdim=True)
    return (z - torch.where(row == -math.inf, 0.0, row)).softmax(-1)


def in_powers_of_two(z: Tensor) -> Tensor:
    z = z * math.log2(math.e)
    e = torch.exp2(z - z.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def overwritten_exp(z: Tensor) -> Tensor:
    e = (z - z.amax(-1, keepdim=True)).exp_()
    return e / e.sum(-1, keepdim=True)


SAME_WEIGHTS: list[Callable[[Tensor], Tensor]] = [
    lambda z: (z - z.amax(-1, keepdim=True)).softmax(-1),
    lambda z: (z - z.max(-1, keepdim=True).values.detach()).softmax(-1),
    lambda z: (z - z.max()).softmax(-1),
    lambda z: (z + -z.amax(-1, keepdim=True)).softmax(-1),
    lambda z: (z - z.amax(-1, keepdim=True)).log_softmax(-1).exp(),
    lambda z: z.log_softmax(-1).softmax(-1),
    lambda z: (z - z.logsumexp(-1, keepdim=True)).exp(),
    lambda z: (z - z.logsumexp(-1, keepdim=True).double().float()).softmax(-1),
    lambda z: (z - z.max().item()).softmax(-1),
    lambda z: (z - z.topk(1, -1).values).softmax(-1),
    lambda z: (z - z.sort(-1, descending=True).values[..., :1]).softmax(-1),
    lambda z: (z - z[..., :1]).softmax(-1),
    lambda z: torch._softmax(z, -1, False),
    largest_in_place,
    then_masked_and_cast,
    then_scaled_and_viewed,
    guarded,
    in_powers_of_two,
    overwritten_exp,
]


@pytest.mark.parametrize("softmax", SAME_WEIGHTS)
def test_a_shift_of_rows_is_undone_in_what_is_measured(softmax: Callable[[Tensor], Tensor]) -> None:
    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return softmax(used((30 * scores(q, k)).masked_fill(hidden(TOKENS), -math.inf))) @ v

    w = watched(attend)
    (line,) = w.coverage()
    assert (line.seen, line.how, line.note) == (True, "softmax by hand", "")
    right(w, LOGITS[0])


def test_a_mean_is_undone_and_a_mean_over_heads_is_no_shift() -> None:
    w = watched(lambda module, q, k, v: (lambda z: (z - z.mean(-1, keepdim=True)).softmax(-1))(used(scores(q, k))) @ v)
    right(w, LOGITS[0])
    w = watched(lambda module, q, k, v: used(scores(q, k) - scores(q, k).mean(1, keepdim=True)).softmax(-1) @ v)
    right(w, LOGITS[0])


def test_the_largest_of_another_axis_is_no_shift() -> None:
    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = scores(q, k)
        return used(z - z.amax(-2, keepdim=True)).softmax(-1) @ v

    w = watched(attend)
    right(w, LOGITS[0])


def test_shifted_logits_that_are_lost_are_named_and_not_measured() -> None:
    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = scores(q, k)
        return (z - z.amax(-1, keepdim=True))[..., list(range(TOKENS))].softmax(-1) @ v

    (line,) = watched(attend).coverage()
    assert (line.seen, line.how) == (False, NO_PRODUCT)


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_the_mask_of_a_masked_softmax_hides(kind: int) -> None:
    """One per query and key, one per sequence and key, one for all; torch's gradient exists for the last only."""
    padded = (torch.arange(TOKENS) >= TOKENS - 3).repeat(BATCH, 1)
    whole = padded[:, None, None].expand(-1, HEADS, TOKENS, -1).contiguous()
    mask = (hidden(TOKENS), padded, whole)[kind]

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = used(scores(q, k))
        return torch._masked_softmax(z, mask, -1, kind) @ v

    model = stack(attend, depth=1)
    LOGITS.clear()
    with torch.no_grad(), lh.watch(model, deep=True) as w:
        model(batch())
    logits = LOGITS[0].masked_fill(whole if kind else mask, -math.inf)
    right(w, logits[:, :, :-3] if kind else logits)  # padded queries do not count
    assert w.last["blocks.0.attn"].facts.masked
