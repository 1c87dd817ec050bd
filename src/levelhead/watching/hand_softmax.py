"""The measurement of one softmax by hand: its logits as they are, by head, and what they were computed from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from levelhead.watching import head_axes, merged_axes
from levelhead.watching.hand_weights import Pending
from levelhead.watching.intercept_softmax import BY_HAND
from levelhead.watching.measure import Call, from_scores
from levelhead.watching.module_stack import Frame, Product, fed, heads_around
from levelhead.watching.score_axes import Arrangement
from levelhead.watching.scores import Scores, Sink

PATH = BY_HAND
GRADIENTS = "dL/dq, dL/dk and dL/dv of a softmax by hand are not followed"
LOST = "an operator between the product of queries and keys and the softmax is not followed"
OTHER_AXIS = (
    "a softmax that is not over the keys of one query (over heads, a batch, or keys of several queries together): the "
    "statistics are those of that softmax as one head"
)
OVER_QUERIES = "a softmax over queries: the weights of a key sum to 1, not those of a query; measured along that axis"


def measured(frame: Frame, x: Tensor, known: Scores, axis: int) -> Pending:
    """The logits x of a softmax over `axis`, which count once the weights are applied to values."""
    x = x.detach()
    hidden = known.hides(x, axis)
    arranged, apart = _arranged(frame, x, known, axis)
    sink = known.sink if known.sink is not None and known.sink.axis == axis else None
    column = None if sink is None or arranged is None else _each_head(sink, arranged, x.shape, axis)
    lost = {"scale_reading": LOST} if known.axes is None else {}

    def measure(hidden: Tensor | None) -> Callable[..., None]:
        logits = x if hidden is None else x.masked_fill(hidden, -torch.inf)
        if sink is not None and column is not None:
            logits = logits.narrow(axis, sink.first, sink.keys)
        if arranged is None:  # over heads or a batch
            call = from_scores(logits.movedim(axis, -1).reshape(1, 1, -1, x.shape[axis]))
            product = _some_factors(known, 1)
        else:
            call = from_scores(arranged.scores(logits))
            product = _factors(known, arranged, call, x.shape, apart)
        if column is not None:
            call = replace(call, scoring=call.scoring._replace(sinks=column.to(call.q.dtype)))
        enter = frame.watch.measure_call(frame, PATH, call, product)
        own = known.facts(hidden) | lost | ({"softmax_axis": "batch"} if arranged is None else {})

        def count(**facts: Any) -> None:
            if arranged is None:
                frame.watched.not_observed[OTHER_AXIS] = None
            elif facts.get("softmax_axis") == "queries":
                frame.watched.not_observed[OVER_QUERIES] = None
            if not apart:
                frame.watched.not_observed[head_axes.TOGETHER] = None
            if frame.watch.gradients:  # without autograd, too: a checkpoint runs the forward pass so
                frame.watched.not_observed[GRADIENTS] = None
            enter(**{name: fact for name, fact in (facts | own).items() if fact is not None})

        return count

    def again(shut: Tensor) -> Callable[..., None]:
        return measure(shut if hidden is None else shut | hidden)

    return Pending(frame, measure(hidden), again)


def _arranged(frame: Frame, x: Tensor, known: Scores, axis: int) -> tuple[Arrangement | None, bool]:
    if known.axes is None and merged_axes.is_one(known.merged, x.shape, axis):
        return None, True
    heads = heads_around(frame, several=x.dim() > 3)
    return head_axes.arranged(known, x.shape, axis, heads, lambda: fed(frame))


def _each_head(sink: Sink, arranged: Arrangement, shape: torch.Size, axis: int) -> Tensor | None:
    """The logit of a sink, (H,); None: the column has other numbers for other rows, as a key has."""
    column = arranged.scores(sink.column.expand(*shape[:axis], 1, *shape[axis + 1 :]))[..., 0]
    return column[0, :, 0] if bool((column == column[:1, :, :1]).all()) else None


def _factors(known: Scores, arranged: Arrangement, call: Call, shape: torch.Size, apart: bool) -> Product:
    """What these logits are the product of."""
    if known.axes is None or not apart:
        return _some_factors(known, call.q.shape[1])
    q, k = arranged.factors(known.axes, known.left, known.right)
    factor = known.factor
    if isinstance(factor, Tensor) and factor.dim():
        each = arranged.scores(factor.expand(shape))
        heads = each[0, :, 0, 0]
        factor = heads if bool((each == heads[:, None, None]).all()) else None
    return Product(_real(q), _real(k), factor)


def _real(x: Tensor) -> Tensor:
    """Complex numbers as pairs, which have the same squares."""
    return torch.view_as_real(x.resolve_conj()).flatten(-2) if x.is_complex() else x


def _some_factors(known: Scores, heads: int) -> Product:
    """No rows of the factors, where it is not known which belong to a head; all of them if there is one."""
    flat = (_real(x.reshape(1, 1, -1, known.left.shape[2])) for x in (known.left, known.right.mT))
    q, k = (x if heads == 1 else x[:, :, :0].expand(1, heads, -1, -1) for x in flat)
    return Product(q, k, None)
