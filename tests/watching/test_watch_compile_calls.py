"""Calls in a compiled graph have the records that they have without the compiler: by place, and without padding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

import levelhead as lh
from tiny_models import MODELS
from watched import one_thread

__all__ = ["one_thread"]  # a fixture
WIDTH, HEADS = 16, 4


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Several(nn.Module):
    """Attends at two places, and in a loop at a third."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.other = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.num_heads = HEADS

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, other = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v, self.other))
        out = sdpa(q, k, v) + sdpa(10 * other, k, v)
        for n in range(1, 3):
            out = out + sdpa(n * other, k, v)
        return out.transpose(1, 2).flatten(2)


def records(w: lh.watch) -> list[Any]:
    return [(r.module, r.facts.effective_scale, r.facts.kv_heads, r.heads.rows.tolist()) for r in w.last.records]


def same_numbers(w: lh.watch, known: lh.watch) -> None:
    for a, b in zip(w.last.records, known.last.records, strict=True):
        for name in ("max_logit", "min_logit", "var_logit", "mean_entropy", "mean_first"):
            np.testing.assert_allclose(getattr(a.heads, name), getattr(b.heads, name), rtol=1e-5, atol=1e-6)


def test_each_place_has_its_record_in_a_graph_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Several(), Several())
    x = torch.randn(2, 6, WIDTH)
    with torch.no_grad():
        with lh.watch(model) as known:
            model(x)
        with lh.watch(model) as w:
            compiled = torch.compile(model, backend="eager", fullgraph=True)
            for _ in range(2):
                compiled(x)
    assert [r.module for r in w.last.records] == ["0", "0 (call 2)", "0 (call 3)", "1", "1 (call 2)", "1 (call 3)"]
    assert records(w) == records(known)
    same_numbers(w, known)
    assert [line.note for line in w.coverage()] == [line.note for line in known.coverage()]


@pytest.mark.parametrize("served", [False, True])
def test_left_padding_of_eager_attention_counts_nowhere_in_a_graph(served: bool) -> None:
    model = MODELS["Llama"].make("eager")
    ids, mask = torch.arange(14).view(2, 7), torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0
    used = lh.torch.huggingface.use(model) if served else None
    with torch.no_grad():
        with lh.watch(model) as known:
            model(ids, attention_mask=mask, use_cache=False)
        with lh.watch(model) as w:
            torch.compile(model, backend="eager")(ids, attention_mask=mask, use_cache=False)
    if used is not None:
        used.undo()
    assert (w.last.records[0].heads.rows == 11).all()
    assert records(w) == records(known)
    same_numbers(w, known)
    assert [(line.how, line.note) for line in w.coverage()] == [(line.how, "") for line in known.coverage()]
