"""Attention by hand of other kinds: what is measured, what is named and not measured, what is no attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import levelhead as lh
from watched import HEADS, WIDTH, batch, hidden, one_thread, outcome, same, sdpa, stack

__all__ = ["one_thread"]  # a fixture
Attend = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]


def watched(attend: Attend, around: Callable[[], AbstractContextManager[Any]] = nullcontext, **options: Any) -> Any:
    """A watch of one block, which kept every bit."""
    model = stack(attend, depth=1, **options)
    x = batch(dtype=options.get("dtype", torch.float32))

    def run() -> Any:
        with around():
            return model(x)

    plain = outcome(model, run)
    with lh.watch(model, deep=True) as w:
        same(plain, outcome(model, run))
    return w


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / math.sqrt(q.shape[-1])


# ---- the axis of the softmax


@pytest.mark.parametrize(("axis", "told"), [(-1, "keys"), (-2, "queries"), (1, "batch"), (0, "batch")])
def test_the_axis_of_the_softmax_is_a_fact(axis: int, told: str) -> None:
    w = watched(lambda module, q, k, v: scores(q, k).softmax(axis) @ v)
    assert w.last["blocks.0.attn"].facts.softmax_axis == told


def test_weights_that_are_normalised_once_more_have_no_axis() -> None:
    """Slot attention: the softmax runs over the slots, then every slot's weights are divided by their sum."""

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = scores(q, k).softmax(-2)
        return weights / (weights.sum(-1, keepdim=True) + 1e-8) @ v

    w = watched(attend)
    assert w.last["blocks.0.attn"].facts.softmax_axis is None


def test_heads_in_a_loop_are_added_up_and_the_coverage_says_so() -> None:
    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.stack([scores(q[:, h], k[:, h]).softmax(-1) @ v[:, h] for h in range(q.shape[1])], 1)

    w = watched(attend)
    (line,) = w.coverage()
    assert line.seen
    assert f"up to {HEADS} calls in one pass, from one place in its code, are added up" in line.note
    assert "cannot be told apart" in str(lh.diagnose(w)) + str(w)


def test_keys_first_is_no_wrong_axis() -> None:
    w = watched(lambda module, q, k, v: (k @ q.mT / math.sqrt(q.shape[-1])).softmax(-2).mT @ v)
    assert w.last["blocks.0.attn"].facts.softmax_axis == "keys"


# ---- named, and not measured


def online(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    total, sums = torch.zeros_like(q), torch.zeros(*q.shape[:3], 1)
    largest = torch.full((*q.shape[:3], 1), -math.inf)
    for keys, values in zip(k.split(5, 2), v.split(5, 2), strict=True):
        s = scores(q, keys)
        new = torch.maximum(largest, s.amax(-1, keepdim=True))
        p, old = (s - new).exp(), (largest - new).exp()
        total, sums, largest = total * old + p @ values, sums * old + p.sum(-1, keepdim=True), new
    return total / sums


def divided_at_the_end(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = scores(q, k).exp()
    return weights @ v / weights.sum(-1, keepdim=True)


def off_by_one(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = scores(q, k).exp()
    return weights / (1 + weights.sum(-1, keepdim=True)) @ v


def off_by_one_stable(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    largest = s.amax(-1, keepdim=True)
    weights = (s - largest).exp()
    return weights / (weights.sum(-1, keepdim=True) + (-largest).exp()) @ v


def sparse(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.sparse.softmax(scores(q, k).tril().to_sparse(), -1).to_dense() @ v


def linear(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = functional.elu(q) + 1, functional.elu(k) + 1
    return q @ (k.mT @ v) / (q @ k.sum(2, keepdim=True).mT)


@pytest.mark.parametrize(
    ("attend", "words"),
    [
        (lambda module, q, k, v: scores(q, k).sigmoid() @ v, "a sigmoid over a product"),
        (online, "a softmax in pieces"),
        (divided_at_the_end, "a softmax in pieces"),
        (off_by_one, "a softmax in pieces"),
        (off_by_one_stable, "a softmax in pieces"),
        (sparse, "sparse tensors"),
        (linear, "no softmax over a product"),
    ],
    ids=["sigmoid", "online", "divided at the end", "off by one", "off by one, stable", "sparse", "linear"],
)
def test_what_is_no_softmax_over_scores_is_named(attend: Attend, words: str) -> None:
    w = watched(attend)
    assert not w.last.records
    (line,) = w.coverage()
    assert not line.seen and words in line.how


# ---- measured


def test_a_column_beside_the_scores_is_a_sink() -> None:
    sinks = torch.linspace(-1, 1, HEADS)

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        column = sinks.view(1, -1, 1, 1).expand(*q.shape[:3], 1)
        s = scores(q, k).masked_fill(hidden(q.shape[2]), -1e9)
        return torch.cat([s, column], -1).softmax(-1)[..., :-1] @ v

    got = watched(attend).last["blocks.0.attn"]
    assert got.facts.sinks and got.facts.keys == got.facts.queries
    calls: list[tuple[Tensor, Tensor]] = []
    model = stack(lambda module, q, k, v: calls.append((q, k)) or v, depth=1)
    model(batch())
    q, k = (x.detach().numpy() for x in calls[0])
    truth = lh.observe(q, k, causal=True, sinks=sinks.numpy()).heads
    np.testing.assert_allclose(got.heads.mean_sink, truth.mean_sink.mean(0), rtol=1e-4)
    np.testing.assert_allclose(got.heads.max_logit, truth.max_logit.max(0), rtol=1e-4)


def test_the_difference_of_two_softmaxes_counts_both() -> None:
    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (a, b), (c, d) = q.chunk(2, -1), k.chunk(2, -1)
        return (scores(a, c).softmax(-1) - 0.5 * scores(b, d).softmax(-1)) @ v

    w = watched(attend)
    (line,) = w.coverage()
    assert line.calls == 2
    assert {record.module for record in w.last.records} == {"blocks.0.attn", "blocks.0.attn (call 2)"}


def test_a_soft_cap_is_a_fact_and_leaves_the_scale() -> None:
    facts = watched(lambda m, q, k, v: (30 * torch.tanh(scores(q, k) / 30)).softmax(-1) @ v).last["blocks.0.attn"].facts
    assert facts.softcap == 30.0
    assert facts.effective_scale == pytest.approx((WIDTH // HEADS) ** -0.5, rel=1e-4)


def test_heads_that_lie_before_the_batch_are_told_apart() -> None:
    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1).reshape(-1, *x.shape[2:]) for x in (q, k, v))
        return (scores(q, k).softmax(-1) @ v).unflatten(0, (HEADS, -1)).transpose(0, 1)

    got = watched(attend).last["blocks.0.attn"].heads
    truth = stack(sdpa(), depth=1)
    with lh.watch(truth) as w:
        truth(batch())
    known = w.last["blocks.0.attn"].heads
    np.testing.assert_allclose(got.max_logit, known.max_logit, rtol=1e-5)
    np.testing.assert_allclose(got.mean_entropy, known.mean_entropy, rtol=1e-5)


def test_a_bias_of_minus_30_is_a_bias_and_one_of_minus_100_a_mask() -> None:
    def least(number: float) -> float:
        def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return (scores(q, k) + torch.zeros(q.shape[2], q.shape[2]).masked_fill(hidden(q.shape[2]), number)).softmax(
                -1
            ) @ v

        return float(watched(attend).last["blocks.0.attn"].heads.min_logit.min())

    assert least(-30.0) < -29
    assert least(-100.0) > -3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_lowest_number_of_a_half_type_hides(dtype: torch.dtype) -> None:
    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scores(q, k).masked_fill(hidden(q.shape[2]), torch.finfo(q.dtype).min).softmax(-1) @ v

    w = watched(attend, dtype=dtype)
    assert float(w.last["blocks.0.attn"].heads.min_logit.min()) > -3
    assert not [finding for finding in lh.diagnose(w) if finding.severity != "note"]


def test_the_small_number_that_hides_nothing_counts_as_seen() -> None:
    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scores(q, k).masked_fill(hidden(q.shape[2]), 1e-9).softmax(-1) @ v

    heads = watched(attend).last["blocks.0.attn"].heads
    assert np.all(heads.lone_rows == 0)  # the first query sees every key


@pytest.mark.parametrize("kind", ["vmap", "grad", "complex", "autocast", "parameter that mixes heads"])
def test_other_worlds_keep_their_bits_and_are_measured(kind: str) -> None:
    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scores(q, k).softmax(-1) @ v

    mix = torch.eye(HEADS) + 0.1

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if kind == "vmap":
            return torch.func.vmap(torch.func.vmap(plain))(q, k, v)
        if kind == "grad":
            return torch.func.grad(lambda q: plain(q, k, v).square().sum())(q)
        if kind == "complex":
            a, b = (torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) for x in (q, k))
            return ((a @ b.mH).real / math.sqrt(q.shape[-1])).softmax(-1) @ v
        if kind == "autocast":
            return plain(q, k, v)
        mixed = torch.einsum("bhij,hg->bgij", scores(q, k), nn.Parameter(mix))
        return torch.einsum("bhij,hg->bgij", mixed.softmax(-1), nn.Parameter(mix)) @ v

    around = (lambda: torch.autocast("cpu", torch.bfloat16)) if kind == "autocast" else nullcontext
    (record,) = watched(attend, around).last.records
    assert (len(record.tally), record.facts.queries, record.facts.keys) == (HEADS, 10, 10)


# ---- no attention


class Routed(nn.Module):
    """A mixture of experts, a gate by cosine, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 10)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        each = torch.stack([expert(x) for expert in self.experts], 2)
        x = torch.einsum("bte,bted->btd", self.gate(x).softmax(-1), each)
        cosine = functional.linear(functional.normalize(x, dim=-1), functional.normalize(self.gate.weight, dim=-1))
        x = x + (cosine.softmax(-1)[..., None, :] @ each).squeeze(2)
        x = x + (functional.gumbel_softmax(self.gate(x), dim=-1)[..., None] * each).sum(2)
        return self.out(x).softmax(-1)


class RoutedByEmbeddings(nn.Module):
    """A mixture of experts whose router multiplies tokens with projected embeddings of the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.project = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.names, self.biases = nn.Embedding(4, WIDTH), nn.Parameter(torch.randn(4, WIDTH))
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        gates = (self.router(x) @ self.project(self.names.weight).T).softmax(-1)
        return torch.einsum("bte,edf,btd->btf", gates, self.experts, x) + gates @ self.biases


class RoutedByEmbeddingsInOrder(RoutedByEmbeddings):
    """The same, where einsum multiplies in the written order: opt_einsum, if it is installed, has it begin with x."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.backends.opt_einsum.flags(enabled=False):
            return super().forward(x)


class Contrasted(nn.Module):
    """Similarities of two embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.a(x[:, 0]) @ self.b(x[:, 1]).T
        return logits.softmax(-1), logits.log_softmax(-1).diagonal().mean()


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("kind", [Routed, RoutedByEmbeddings, RoutedByEmbeddingsInOrder, Contrasted])
def test_routers_classifiers_and_similarities_are_no_attention(kind: Callable[[], nn.Module], half: bool) -> None:
    torch.manual_seed(0)
    model = kind()
    with torch.autocast("cpu", torch.bfloat16, enabled=half), lh.watch(model, deep=True) as w:
        for _ in range(2):  # autocast keeps the casts of the first pass
            model(batch())
    assert not w.last.records


# ---- fused operators below Python


class Operator(nn.Module):
    """Calls torch's operator itself, as an exported graph does."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.project(x).chunk(3, -1))
        return torch.ops.aten.scaled_dot_product_attention(q, k, v, None, 0.0, True).transpose(1, 2).flatten(2)


def test_a_fused_operator_that_no_wrapper_saw_is_found_by_the_probe() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Operator())
    plain = outcome(model, lambda: model(batch()))
    with lh.watch(model) as w:
        for _ in range(2):
            same(plain, outcome(model, lambda: model(batch())))
    facts = w.last["0"].facts
    assert facts.causal and facts.effective_scale == pytest.approx((WIDTH // HEADS) ** -0.5, rel=1e-4)
    assert "sdpa, below Python was found in pass 1" in w.run().by_hand


class Cached(nn.Module):
    """Keys by a weight that is computed, behind those of a cache that is an empty tensor without axes."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(16, 16), nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = self.q(x), self.k(x)
        k = torch.cat([k.new_empty(0), k], 1)
        return (q @ k.mT / 4).softmax(-1) @ k


def test_an_empty_cache_beside_what_is_followed_is_followed() -> None:
    torch.manual_seed(0)
    with lh.watch(Cached(), deep=True) as w:
        w.model(torch.randn(2, 7, 16))
    assert not any("could not be followed" in seen.note for seen in w.coverage())
    assert w.last.records
