"""Heads of a call of torch's function that is not (B, H, T, D), or that layers show to be something else in four axes.

(N, T, D) may be a batch, heads, or both in either order; with more dimensions,
blocks may stand after heads. What the layers put out decides (`head_axes`), or heads are not told apart, and the
coverage says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from levelhead.watching import head_axes, score_axes
from levelhead.watching.described import Call
from levelhead.watching.module_stack import Frame, fed, heads_around
from levelhead.watching.score_axes import Arrangement
from levelhead.watching.scores import Scores
from levelhead.watching.undisturbed import undisturbed

_USUAL = 4  # axes of (B, H, T, D)


class Found(NamedTuple):
    """A call as (B, H, T, D), and how q, k and v, or their gradients, become that."""

    call: Call
    views: tuple[Callable[[Tensor], Tensor], ...]


def is_other(frame: Frame, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a call is not (B, H, T, D): its axes are not four; or a layer put out as many numbers as q has, and none
    has these tokens and heads. Sizes alone decide: usual calls wait for no device. Where tokens and heads were
    confused, they are reported as they were passed."""
    with _apart_from_the_model(frame):
        if any(x.dim() != _USUAL for x in (q, k, v)):
            return True
        B, H, T, D = q.shape
        numbers = q.numel()
        if frame.watched.heads == H or k.shape[:2] != (B, H) or not numbers:
            return False
        sizes = [(layer.tokens, layer.rows.shape[1]) for layer in fed(frame) if not layer.norm]
    if any(n == B * T and width % (H * D) == 0 for n, width in sizes):
        return False
    alike = [n for n, width in sizes if n and n * width in (numbers, 3 * numbers)]
    return bool(alike) and B * H not in alike


def found(frame: Frame, call: Call) -> Found:
    """Of a call whose q and k have the same leading dimensions."""
    with _apart_from_the_model(frame):
        if call.q.dim() == _USUAL:
            call = replace(call, scoring=call.scoring._replace(scale=call.scoring.scale[:1]))
        call = call.detached()
        arranged = _arranged(frame, call)
        return Found(_laid_out(call, arranged), _views(call, arranged))


@contextmanager
def _apart_from_the_model(frame: Frame) -> Iterator[None]:
    before, frame.busy = frame.busy, True
    try:
        with undisturbed(), torch.no_grad():
            yield
    finally:
        frame.busy = before


def _arranged(frame: Frame, call: Call) -> Arrangement:
    q, k = call.q, call.k
    shape = torch.Size((*q.shape[:-1], k.shape[-2]))
    keys = len(shape) - 1
    axes = tuple(range(keys - 1))
    if call.scoring.scale.numel() > 1:  # a remedy has one for each head, by torch's convention
        return Arrangement(axes[:-1], axes[-1:], (keys - 1,), keys)
    heads = heads_around(frame, several=q.dim() > 3)
    if not q.numel() or not k.numel():  # nothing to compare: as many as other steps have
        each = heads if heads and shape[:-2].numel() % heads == 0 else 1
        return Arrangement(axes, (), (keys - 1,), keys, split=each)
    left, right = q.reshape(-1, *q.shape[-2:]), k.reshape(-1, *k.shape[-2:]).mT
    stand = score_axes.stand_in(len(left), shape[-2], shape[-1])
    known = Scores(left, right, None, None if stand is None else stand.view(shape))
    arranged, apart = head_axes.arranged(known, shape, keys, heads, lambda: fed(frame), usual=q.dim() != _USUAL)
    assert arranged is not None  # the softmax is over the keys
    if not apart:
        frame.watched.not_observed[head_axes.TOGETHER] = None
    return arranged


def _laid_out(call: Call, arranged: Arrangement) -> Call:
    lead, (T, S) = call.q.shape[:-2], (call.q.shape[-2], call.k.shape[-2])
    q, k, scoring = arranged.scores(call.q), call.k, call.scoring
    for axis in reversed(arranged.heads):  # which share keys
        if k.stride(axis):
            break
        k = k.narrow(axis, 0, 1)
    k = replace(arranged, grouped=1).scores(k)
    mask, causal = scoring.mask, scoring.causal
    if causal and arranged.grouped > 1:  # of the rows as they were
        seen = torch.ones((T, S), dtype=torch.bool, device=q.device).tril()
        if mask is not None:
            seen = mask & seen if mask.dtype is torch.bool else mask.masked_fill(~seen, -torch.inf)
        mask, causal = seen, False
    if mask is not None:
        mask = mask[(None,) * (len(lead) + 2 - mask.dim())]
        if mask.shape[:-2].numel() > 1 or arranged.grouped > 1:
            mask = arranged.scores(mask.expand(*lead, T, mask.shape[-1]))
        else:
            mask = mask.reshape(mask.shape[-2:])
    scale = scoring.scale if scoring.scale.numel() > 1 else scoring.scale.expand(q.shape[1])
    return replace(call, q=q, k=k, scoring=scoring._replace(scale=scale, mask=mask, causal=causal))


def _views(call: Call, arranged: Arrangement) -> tuple[Callable[[Tensor], Tensor], ...]:
    lead = call.q.shape[:-2]

    def queries(x: Tensor) -> Tensor:
        return arranged.scores(x) if x.shape[:-2] == lead else x.reshape(1, 1, -1, x.shape[-1])

    def keys(x: Tensor) -> Tensor:
        own = x.shape[:-2] == lead  # else they are broadcast, and count for all heads
        return replace(arranged, grouped=1).scores(x) if own else x.reshape(1, 1, -1, x.shape[-1])

    return queries, keys, keys
