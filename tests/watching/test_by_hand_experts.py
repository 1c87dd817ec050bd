"""A mixture of experts is named and not counted; attention over learned keys is attention."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import levelhead as lh
from levelhead.watching.by_hand import MIXTURE
from watched import BATCH, TOKENS, WIDTH, batch, one_thread

__all__ = ["one_thread"]  # a fixture
EXPERTS = TOKENS  # as many learned keys as tokens


class Experts(nn.Module):
    """Tokens are routed by a product with learned keys, which a projection gives."""

    def __init__(self, forward: Callable[[Experts, Tensor], Tensor]) -> None:
        super().__init__()
        self.router, self.project, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.embeddings = nn.Embedding(EXPERTS, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.run = forward

    def weights(self, x: Tensor) -> Tensor:
        return (self.router(x) @ self.project(self.embeddings.weight).mT).softmax(-1)

    def outputs(self, x: Tensor) -> Tensor:
        return torch.stack([expert(x) for expert in self.experts], 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def product(m: Experts, x: Tensor) -> Tensor:
    return torch.einsum("bte,bted->btd", m.weights(x), m.outputs(x))


def entries(m: Experts, x: Tensor) -> Tensor:
    return (m.weights(x)[..., None] * m.outputs(x)).sum(2)


def same_shape(m: Experts, x: Tensor) -> Tensor:
    return (m.weights(x)[..., None].expand(-1, -1, -1, WIDTH) * m.outputs(x)).sum(2)


def one_by_one(m: Experts, x: Tensor) -> Tensor:
    weights = m.weights(x)
    return torch.stack([weights[..., n : n + 1] * expert(x) for n, expert in enumerate(m.experts)]).sum(0)


def by_number(m: Experts, x: Tensor) -> Tensor:
    keys = m.project(m.embeddings(torch.arange(EXPERTS)))
    return torch.einsum("bte,bted->btd", (m.router(x) @ keys.mT).softmax(-1), m.outputs(x))


def normed(m: Experts, x: Tensor) -> Tensor:
    keys = nn.functional.layer_norm(m.project(m.embeddings.weight), (WIDTH,))
    return torch.einsum("bte,bted->btd", (m.router(x) @ keys.mT).softmax(-1), m.outputs(x))


@pytest.mark.parametrize("forward", [product, entries, same_shape, one_by_one, by_number, normed])
def test_a_mixture_of_experts_is_named_and_raises_no_alarm(forward: Callable[[Experts, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    with lh.watch(Experts(forward)) as w:
        w.model(batch())
    (line,) = w.coverage()
    assert (line.seen, line.how) == (False, MIXTURE) and not w.last.records


def latents(m: Experts, x: Tensor) -> Tensor:
    return m.weights(x) @ m.value(m.embeddings.weight)


def learned_positions(m: Experts, x: Tensor) -> Tensor:
    return m.weights(x) @ m.value(x)


def learned_queries(m: Experts, x: Tensor) -> Tensor:
    queries = m.project(m.embeddings.weight)
    return (queries @ m.router(x).mT).softmax(-1) @ m.value(x)


def positions_alone(m: Experts, x: Tensor) -> Tensor:
    queries, keys = m.project(m.embeddings.weight), m.router(m.embeddings.weight)
    return (queries @ keys.mT).softmax(-1).expand(BATCH, -1, -1) @ m.value(x)


def gated(m: Experts, x: Tensor) -> Tensor:
    """Weights over learned keys and values, each times a number of the token's own."""
    return (m.weights(x) * m.outputs(x).mean(-1).sigmoid()) @ m.value(m.embeddings.weight)


@pytest.mark.parametrize("forward", [latents, learned_positions, learned_queries, positions_alone, gated])
def test_attention_over_learned_keys_or_queries_is_counted(forward: Callable[[Experts, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    with lh.watch(Experts(forward)) as w:
        w.model(batch())
    (line,) = w.coverage()
    assert line.seen and line.calls == 1 and MIXTURE not in line.note
