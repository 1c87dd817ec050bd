"""`lh.preflight`: which tokens see which. Bugs that leave every weight a fair softmax, and the designs beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import levelhead as lh
from levelhead.preflight_checks.result import Preflight
from watched import one_thread  # noqa: F401

H, D, WIDTH, T = 4, 8, 32, 12


def wrong(result: Preflight) -> list[str]:
    return sorted({f.kind for f in result.findings if f.severity != "note"})


class Own(nn.Module):
    """Attention whose middle is a function of q, k, v (B, T, H, D)."""

    def __init__(self, middle: Callable[..., Tensor], window: int | None) -> None:
        super().__init__()
        self.middle, self.sliding_window = middle, window
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (H, D)) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(self.middle(q, k, v).flatten(2))


class Model(nn.Module):
    def __init__(self, middle: Callable[..., Tensor], *, window: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, WIDTH)
        self.attn = Own(middle, window)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return x + self.attn(x)


def ids(rows: int = 3) -> Tensor:
    return torch.randint(50, (rows, T), generator=torch.Generator().manual_seed(1))


def sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), **options).transpose(1, 2)


def shown(rule: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Keys j that query i sees."""
    at = torch.arange(T)
    return lambda q, k, v: sdpa(q, k, v, attn_mask=rule(at[:, None], at[None]))


def letters(products: str, sums: str) -> Callable[..., Tensor]:
    def middle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = torch.einsum(products, q, k) * D**-0.5
        weights = s.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
        return torch.einsum(sums, weights, v)

    return middle


def slopes(*shape: int) -> Callable[..., Tensor]:
    """ALiBi, with the slopes on one axis of (B, H, T, T)."""
    away = (torch.arange(T)[None] - torch.arange(T)[:, None]).float()
    bias = 2.0 ** -torch.arange(2.0, 2 * H + 1, 2).view(shape) * away
    hidden = torch.zeros(T, T).masked_fill(away > 0, -torch.inf)
    return lambda q, k, v: sdpa(q, k, v, attn_mask=bias + hidden)


def shared(own: float) -> Callable[..., Tensor]:
    """Queries that are keys, too: a token's own logit is `own`, later ones are lower still."""

    def middle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = torch.einsum("bqhd,bkhd->bhqk", q, functional.normalize(k, dim=-1))
        s = s.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -1e9)
        return torch.einsum("bhqk,bkhd->bqhd", s.masked_fill(torch.eye(T, dtype=torch.bool), own).softmax(-1), v)

    return middle


BUGS: dict[str, tuple[Callable[..., Tensor], dict[str, Any], str]] = {
    "layout of FlashAttention": (functional.scaled_dot_product_attention, {}, "tokens do not see each other"),
    "a letter of the values": (letters("bqhd,bkhd->bhqk", "bhqk,bqhd->bqhd"), {}, "tokens do not see each other"),
    "a letter of the product": (letters("bqhd,bkhe->bhqk", "bhqk,bkhd->bqhd"), {}, "only the sum of q counts"),
    "half of the window": (shown(lambda i, j: (j <= i) & (i - j < 2)), {"window": 4}, "window too narrow"),
    "chunks": (shown(lambda i, j: (j <= i) & (i // 4 == j // 4)), {"window": 4}, "window too narrow"),
    "slopes of rows": (slopes(H, 1, 1, 1), {}, "results depend on the place in the batch"),
    "diagonal hidden": (shared(-1e9), {}, "does not see itself"),
}

DESIGNS: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    "right letters": (letters("bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd"), {}),
    "window and sinks": (shown(lambda i, j: (j <= i) & ((i - j < 4) | (j < 2))), {"window": 4}),
    "slopes of heads": (slopes(1, H, 1, 1), {}),
    "shared queries and keys": (shared(-1e5), {}),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_of_sight_is_named(name: str) -> None:
    middle, options, kind = BUGS[name]
    assert kind in wrong(lh.preflight(Model(middle, **options), ids(4)))


@pytest.mark.parametrize("name", DESIGNS)
def test_a_design_is_silent(name: str) -> None:
    middle, options = DESIGNS[name]
    result = lh.preflight(Model(middle, **options), ids(4))
    assert wrong(result) == [] and result["tokens mixed"].verdict == "passed"
    assert result["order of rows"].verdict == "passed"


def test_an_output_projection_of_zeros_is_not_judged() -> None:
    model = Model(sdpa)
    nn.init.zeros_(model.attn.o_proj.weight)
    result = lh.preflight(model, ids())
    assert wrong(result) == [] and result["tokens mixed"].verdict == "not judged"


class Holding(Model):
    """Keeps a causal mask and applies it to its first heads."""

    def __init__(self, heads: int, *, flag: bool | None = None) -> None:
        super().__init__(lambda q, k, v: sdpa(q, k, v, attn_mask=self.shown))
        hidden = torch.ones(T, T).triu(1) > 0
        self.shown = ~(hidden & (torch.arange(H) < heads)[:, None, None])
        self.attn.register_buffer("bias", torch.ones(T, T).tril()[None, None])
        self.attn.is_causal = flag


class Chat(Model):
    """A language model by its output and its cache argument."""

    def __init__(self, rule: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(shown(rule))
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, ids: Tensor, past_key_values: Any = None) -> Tensor:
        return self.head(super().forward(ids))


def test_a_model_that_was_meant_to_be_causal_is_named() -> None:
    for model in (Holding(0), Holding(1), Chat(lambda i, j: i - j < T)):
        result = lh.preflight(model, ids())
        assert wrong(result) == ["not causal"]
        assert [f.severity for f in result.findings if f.kind == "not causal"] == ["warning"]
    assert wrong(lh.preflight(model, ids(), causal=False)) == []


def test_a_model_of_both_directions_is_not_judged() -> None:
    for model in (Model(sdpa), Holding(0, flag=False), Chat(lambda i, j: (j <= i) | (j < 4))):
        result = lh.preflight(model, ids())
        assert wrong(result) == [] and result["causality"].verdict == "not judged"


def test_a_mask_of_evaluation_only_is_named() -> None:
    model = Model(lambda q, k, v: sdpa(q, k, v, is_causal=not model.training))
    result = lh.preflight(model, ids())
    assert wrong(result) == ["not causal"] and "training mode" in result["causality"].moved


def test_rows_of_one_token_have_no_other_token() -> None:
    class Frames(nn.Module):
        """One patch in each frame."""

        def __init__(self) -> None:
            super().__init__()
            self.frames = Own(sdpa, None)

        def forward(self, x: Tensor) -> Tensor:
            return self.frames(x.flatten(0, 1)[:, None]).view(x.shape)

    torch.manual_seed(0)
    result = lh.preflight(Frames(), torch.randn(2, 16, WIDTH))
    assert "tokens do not see each other" not in wrong(result)
