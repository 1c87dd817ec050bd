"""Whether queries and keys are of one sequence, where there are as many: then the query at a padded key's place is
padding, and counts nowhere; else it is a real one, and counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import levelhead as lh
from levelhead.watching.sequences import NOT_KNOWN
from tiny_models import deepseek
from watched import one_thread
from wrong_scale import HEADS, WIDTH, join, split

__all__ = ["one_thread"]  # a fixture

B, T, PADDED = 2, 12, 5
REAL = torch.ones(B, T, dtype=torch.bool)
REAL[0, -PADDED:] = False


def tokens(seed: int) -> Tensor:
    return torch.randn(B, T, WIDTH, generator=torch.Generator().manual_seed(seed))


X, MEMORY, PLACES = tokens(0), tokens(1), tokens(2)[:1]


class Own(nn.Module):
    """Projections of its own, and a mask. No name says what they read."""

    def __init__(self, read: Callable[[Own, Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        for norm in self.norms:
            nn.init.normal_(norm.weight)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.read(self, x)
        heads = (split(layer(y)) for layer, y in ((self.q, q), (self.k, k), (self.v, k)))
        return self.out(join(functional.scaled_dot_product_attention(*heads, attn_mask=REAL[:, None, None])))


class OwnInTurns(Own):
    """What the queries' projection read is gone when the keys' projection reads, and leaves it its memory."""

    def forward(self, x: Tensor) -> Tensor:
        q = split(self.q(self.norms[0](x)))
        k = split(self.k(self.norms[1](self.read(self, x)[1])))
        return self.out(join(functional.scaled_dot_product_attention(q, k, k, attn_mask=REAL[:, None, None])))


class Fused(nn.Module):
    """`nn.MultiheadAttention`, under a name that says nothing."""

    def __init__(self, read: Callable[..., tuple[Tensor, Tensor, Tensor]], keywords: bool = False) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        for norm in self.norms:
            nn.init.normal_(norm.weight)
        self.read, self.keywords = read, keywords

    def forward(self, x: Tensor) -> Tensor:
        given = self.read(self, x)
        if self.keywords:
            named = dict(zip(("query", "key", "value"), given, strict=True))
            return self.mix(**named, key_padding_mask=~REAL)[0]
        return self.mix(*given, key_padding_mask=~REAL, need_weights=False)[0]


def rows(model: nn.Module, *, grad: bool = True, **options: bool) -> list[int]:
    with torch.set_grad_enabled(grad), lh.watch(model, **options) as w:
        model(X)
    (record,) = w.last.records
    return sorted(set(record.heads.rows.tolist()))


OF_ANOTHER = {
    "its own tensor": lambda m, x: (x, MEMORY),
    "behind norms": lambda m, x: (m.norms[0](x), m.norms[1](MEMORY)),
    "the same norm": lambda m, x: (m.norms[0](x), m.norms[0](MEMORY)),
    "the same positions": lambda m, x: (x + PLACES, MEMORY + PLACES),
}
OF_ITSELF = {
    "one tensor": lambda m, x: (x, x),
    "views of it": lambda m, x: (x[:, :], x[:, :]),
    "a norm each": lambda m, x: (m.norms[0](x), m.norms[1](x)),
    "norms of a norm": lambda m, x: (m.norms[0](x), m.norms[1](m.norms[0](x))),
    "positions on both": lambda m, x: (x + PLACES, x + PLACES),
    "positions on one": lambda m, x: (x + PLACES, x),
    "dropout on each": lambda m, x: (functional.dropout(x, 0.1), functional.dropout(x, 0.1)),
}


@pytest.mark.parametrize("deep", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", OF_ANOTHER)
def test_queries_at_the_places_of_padded_keys_of_another_sequence_count(name: str, grad: bool, deep: bool) -> None:
    torch.manual_seed(0)
    assert rows(Own(OF_ANOTHER[name]), grad=grad, deep=deep) == [B * T]


@pytest.mark.parametrize("deep", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", OF_ITSELF)
def test_padded_queries_of_the_sequence_itself_do_not(name: str, grad: bool, deep: bool) -> None:
    torch.manual_seed(0)
    assert rows(Own(OF_ITSELF[name]), grad=grad, deep=deep) == [B * T - PADDED]


def test_memory_that_is_used_again_says_nothing() -> None:
    torch.manual_seed(0)
    for keys, wanted in ((MEMORY, B * T), (X, B * T - PADDED)):
        model = OwnInTurns(lambda m, x, keys=keys: (x, keys))
        model.norms[1] = model.norms[0]
        assert rows(model, grad=False) == [wanted]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("keywords", [True, False])
def test_torchs_module_says_what_it_was_given(keywords: bool, training: bool) -> None:
    torch.manual_seed(0)
    for cases, wanted in ((OF_ANOTHER, B * T), (OF_ITSELF, B * T - PADDED)):
        for name, read in cases.items():

            def given(m: nn.Module, x: Tensor, read: Callable = read) -> tuple[Tensor, Tensor, Tensor]:
                q, k = read(m, x)
                return q, k, k

            model = Fused(given, keywords).train(training)
            assert rows(model) == [wanted], name
            assert rows(model, grad=False) == [wanted], name


class Latents(nn.Module):
    """Queries and keys by way of narrow tensors; `norm` is between, a layer or a function."""

    def __init__(self, read: Callable[[Tensor], tuple[Tensor, Tensor]], norm: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.narrow = nn.ModuleList(nn.Linear(WIDTH, WIDTH // 2, bias=False) for _ in range(2))
        self.q, self.k = (nn.Linear(WIDTH // 2, WIDTH) for _ in range(2))
        self.read, self.norm = read, norm

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.read(x)
        q, k = (self.norm(layer(y)) for layer, y in zip(self.narrow, (q, k), strict=True))
        q, k = split(self.q(q)), split(self.k(k))
        return join(functional.scaled_dot_product_attention(q, k, k, attn_mask=REAL[:, None, None]))


def function_norm(x: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:])


BEHIND_LATENTS = {
    "one tensor": (lambda x: (x, x), B * T - PADDED),
    "positions on one": (lambda x: (x + PLACES, x), B * T - PADDED),
    "of another": (lambda x: (x, MEMORY), B * T),
    "of another, the same positions": (lambda x: (x + PLACES, MEMORY + PLACES), B * T),
}


@pytest.mark.parametrize("name", BEHIND_LATENTS)
@pytest.mark.parametrize("grad", [True, False])
def test_latents_of_equal_width_are_of_the_sequence_that_their_projections_read(name: str, grad: bool) -> None:
    torch.manual_seed(0)
    read, wanted = BEHIND_LATENTS[name]
    for norm in (nn.LayerNorm(WIDTH // 2), torch.clone, torch.Tensor.contiguous):
        model = Latents(read, norm)
        assert rows(model, grad=grad) == [wanted]


@pytest.mark.parametrize("name", BEHIND_LATENTS)
def test_what_is_not_known_of_latents_is_named(name: str) -> None:
    torch.manual_seed(0)
    read, wanted = BEHIND_LATENTS[name]
    model = Latents(read, function_norm)
    with lh.watch(model) as w:
        model(X)
    assert {*w.last.records[0].heads.rows.tolist()} == {wanted}
    named = any(NOT_KNOWN in seen.note for seen in w.coverage())
    assert named == (wanted < B * T)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("rank", [16, 24, 32])
def test_latents_of_one_width_that_a_cache_copied_are_of_one_sequence(rank: int, training: bool) -> None:
    torch.manual_seed(0)
    model = deepseek(q_lora_rank=rank, kv_lora_rank=rank).train(training)
    with torch.set_grad_enabled(training), lh.watch(model) as w:
        model(input_ids=torch.randint(5, 60, (B, T)), attention_mask=REAL.long())
    assert {n for record in w.last.records for n in record.heads.rows.tolist()} == {B * T - PADDED}
    assert not any(seen.note for seen in w.coverage())


def test_latents_of_two_widths_go_back_to_one_sequence() -> None:
    model = deepseek().eval()
    with torch.no_grad(), lh.watch(model) as w:
        model(input_ids=torch.randint(5, 60, (B, T)), attention_mask=REAL.long())
    assert {n for record in w.last.records for n in record.heads.rows.tolist()} == {B * T - PADDED}
