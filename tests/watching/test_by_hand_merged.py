"""A softmax over more than the keys of one query is named; keys, queries and blocks of keys in a loop are described."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import levelhead as lh
from levelhead.watching.by_hand import NO_PRODUCT
from levelhead.watching.hand_softmax import OTHER_AXIS, OVER_QUERIES
from watched import BATCH, HEADS, TOKENS, WIDTH, batch, one_thread, outcome, same, stack

__all__ = ["one_thread"]  # a fixture
Attend = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]
D = WIDTH // HEADS
LOGITS: list[Tensor] = []  # as the softmax gets them


def weights(logits: Tensor, axis: int = -1) -> Tensor:
    LOGITS.append(logits.detach().movedim(axis, -1))
    return logits.softmax(axis)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / math.sqrt(q.shape[-1])


def watched(attend: Attend, depth: int = 1) -> Any:
    model = stack(attend, depth=depth)
    plain = outcome(model, lambda: model(batch()))
    LOGITS.clear()
    with lh.watch(model, deep=True) as w:
        same(plain, outcome(model, lambda: model(batch())))
    return w


def heads_and_keys(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    each = weights(scores(q, k).transpose(1, 2).flatten(2))
    return each.view(BATCH, TOKENS, HEADS, TOKENS).transpose(1, 2) @ v


def heads_beside_each_other(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    each = weights(torch.cat([scores(q[:, h], k[:, h]) for h in range(HEADS)], -1))
    return torch.stack(each.chunk(HEADS, -1), 1) @ v


def batch_and_keys(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    each = weights(scores(q, k).permute(1, 2, 0, 3).reshape(HEADS, TOKENS, BATCH * TOKENS))
    return each.view(HEADS, TOKENS, BATCH, TOKENS).permute(2, 0, 1, 3) @ v


def blocks_beside_global_keys(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every query sees the keys of its block and two that all see."""
    near_q, near_k, near_v = (x.unflatten(2, (2, TOKENS // 2)) for x in (q, k, v))
    far = torch.einsum("bhnqd,bhgd->bhnqg", near_q, k[:, :, :2])
    near = torch.einsum("bhnqd,bhnkd->bhnqk", near_q, near_k)
    far, near = weights(torch.cat([far, near], -1) / math.sqrt(D)).split([2, TOKENS // 2], -1)
    return (torch.einsum("bhnqg,bhgd->bhnqd", far, v[:, :, :2]) + near @ near_v).flatten(2, 3)


def everything(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weights(scores(q, k).flatten(1)).view(BATCH, HEADS, TOKENS, TOKENS) @ v


def over_heads(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weights(scores(q, k), 1) @ v


NOT_OVER_KEYS = [heads_and_keys, heads_beside_each_other, batch_and_keys, everything, over_heads]


@pytest.mark.parametrize("attend", NOT_OVER_KEYS, ids=lambda f: f.__name__)
def test_a_softmax_over_more_than_keys_is_named_and_measured_as_it_is(attend: Attend) -> None:
    w = watched(attend)
    (line,) = w.coverage()
    assert line.seen and OTHER_AXIS in line.note
    assert any(OTHER_AXIS in reason for reason in lh.diagnose(w).verdict.not_judged)
    (record,) = w.last.records
    used = LOGITS[0].double()
    p = used.softmax(-1)
    assert record.facts.softmax_axis == "batch" and len(record.tally) == 1
    np.testing.assert_allclose(record.heads.max_logit, used.max(), rtol=1e-5)
    np.testing.assert_allclose(record.heads.mean_entropy, -torch.xlogy(p, p).sum(-1).mean(), rtol=1e-5)


def key_by_key(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weights(torch.stack([scores(q, k[:, :, [j]])[..., 0] for j in range(TOKENS)], -1)) @ v


def query_by_query(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weights(torch.stack([scores(q[:, :, [t]], k)[:, :, 0] for t in range(TOKENS)], 2)) @ v


def blocks_of_keys(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    blocks = k.unflatten(2, (2, -1))  # (B, H, 2, T/2, D)
    each = scores(q[:, :, None], blocks)  # (B, H, 2, T, T/2)
    return weights(each.transpose(2, 3).flatten(3)) @ v


@pytest.mark.parametrize("attend", [key_by_key, query_by_query, blocks_of_keys], ids=lambda f: f.__name__)
def test_keys_and_queries_in_pieces_are_described(attend: Attend) -> None:
    w = watched(attend)
    (line,) = w.coverage()
    assert line.seen and not line.note
    (record,) = w.last.records
    used = LOGITS[0].double()
    p = used.softmax(-1)
    np.testing.assert_allclose(record.heads.max_logit, used.amax((0, 2, 3)), rtol=1e-5)
    np.testing.assert_allclose(record.heads.mean_entropy, -torch.xlogy(p, p).sum(-1).mean((0, 2)), rtol=1e-5)


def products_key_by_key(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    each = [(q * k[:, :, j : j + 1]).sum(-1) / math.sqrt(D) for j in range(TOKENS)]
    return torch.stack(each, -1).softmax(-1) @ v


def products_and_columns(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    each = [(q * k[:, :, j : j + 1]).sum(-1, keepdim=True) for j in range(TOKENS)]
    return torch.cat(each, -1).softmax(-1) @ v


@pytest.mark.parametrize("attend", [products_key_by_key, products_and_columns], ids=lambda f: f.__name__)
def test_scores_that_are_multiplied_key_by_key_are_named(attend: Attend) -> None:
    (line,) = watched(attend).coverage()
    assert not line.seen and NO_PRODUCT in line.how


def weights_of_heads_stacked(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.stack([weights(scores(q[:, h], k[:, h])) for h in range(HEADS)], 1) @ v


def weights_of_queries_beside(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([weights(scores(part, k)) for part in q.chunk(2, 2)], 2) @ v


def weights_written_into_a_buffer(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    each = torch.zeros(BATCH, HEADS, TOKENS, TOKENS)
    for h in range(HEADS):
        each[:, h] = weights(scores(q[:, h], k[:, h]))
    return each @ v


JOINED = [weights_of_heads_stacked, weights_of_queries_beside, weights_written_into_a_buffer]


@pytest.mark.parametrize("attend", JOINED, ids=lambda f: f.__name__)
def test_weights_that_are_joined_count_all_of_them(attend: Attend) -> None:
    w = watched(attend)
    assert w.coverage()[0].calls == len(LOGITS)
    (record,) = w.last.records
    assert record.heads.max_logit.max() == pytest.approx(float(max(x.max() for x in LOGITS)), rel=1e-5)
    assert record.heads.rows.sum() == BATCH * HEADS * TOKENS
    assert record.facts.softmax_axis in ("keys", None)


def test_a_softmax_over_queries_is_named() -> None:
    w = watched(lambda module, q, k, v: weights(scores(q, k), -2) @ v)
    (line,) = w.coverage()
    assert line.note == OVER_QUERIES and w.last.records[0].facts.softmax_axis == "queries"


def test_blocks_beside_global_keys_are_keys_of_one_query() -> None:
    w = watched(blocks_beside_global_keys)
    assert not any(OTHER_AXIS in seen.note for seen in w.coverage())
    assert w.last.records[0].facts.softmax_axis == "keys"
    assert w.last.records[0].heads.max_logit.max() == pytest.approx(float(LOGITS[0].max()))
