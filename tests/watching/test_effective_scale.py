"""The effective scale is read wherever projections and scale are, head by head; what cannot be known is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import levelhead as lh
from levelhead.runs.record import Facts
from levelhead.watching import origins
from levelhead.watching.scale_sides import ONE_TOKEN
from scale_layouts import LAYOUTS, NOPE, ROPE, Core, Latent, WithCore, rotated
from watched import one_thread
from wrong_scale import D_K, HEADS, WIDTH, join, split

__all__ = ["one_thread"]  # a fixture


def tokens(batch: int = 2, length: int = 24) -> Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(1))


def facts(model: nn.Module, *inputs: Tensor, passes: int = 1, **options: Any) -> Facts:
    with torch.no_grad(), lh.watch(model, **options) as w:
        for _ in range(passes):
            model(*inputs or (tokens().to(next(model.parameters()).dtype),))
    return w.last.records[0].facts


@pytest.mark.parametrize("times", [1.0, 3.0])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_read(name: str, times: float) -> None:
    torch.manual_seed(0)
    got = facts(LAYOUTS[name](times), deep=name == "core by hand")
    assert got.scale_reading == "projections"
    assert got.effective_scale == pytest.approx(times * got.d_k**-0.5, rel=1e-5)
    assert got.effective_scales == ()  # all heads alike


@pytest.mark.parametrize("name", ["core of its own", "latent", "own weights, linear", "grouped, partly rotated"])
def test_half_precision_and_later_passes(name: str) -> None:
    torch.manual_seed(0)
    got = facts(LAYOUTS[name](3.0).bfloat16(), passes=3)
    assert got.effective_scale == pytest.approx(3.0 * got.d_k**-0.5, rel=5e-3)


def test_the_parts_of_a_head_are_known() -> None:
    torch.manual_seed(0)
    got = facts(Latent())
    assert (got.d_k, got.head_parts) == (NOPE + ROPE, (NOPE, ROPE))


class OneHead(WithCore):
    """One head of several is multiplied with a number of its own."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(w(x)) for w in (self.wq, self.wk, self.wv))
        own = torch.ones(HEADS, 1, 1)
        own[2] = D_K**0.5
        return self.wo(join(self.inner(rotated(q) * own, rotated(k), v)))


def test_one_head_with_a_scale_of_its_own_shows() -> None:
    torch.manual_seed(0)
    got = facts(OneHead())
    assert got.effective_scales == pytest.approx((0.25, 0.25, 1.0, 0.25), rel=1e-5)
    assert got.effective_scale == pytest.approx(0.25, rel=1e-5)


class Through(nn.Module):
    """Something of one's choice between the projection of q and the call."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.gate, self.norm = nn.Linear(WIDTH, WIDTH), nn.RMSNorm(D_K)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(w(x)) for w in (self.q, self.k, self.v))
        return join(functional.scaled_dot_product_attention(self.between(self, x, q), k, v))


def by_position(module: Through, x: Tensor, q: Tensor) -> Tensor:
    return q * torch.log(torch.arange(2, 2 + q.shape[2]))[:, None]


READINGS = {
    "normalised": [
        lambda module, x, q: module.norm(q),
        lambda module, x, q: functional.normalize(q, dim=-1),
        lambda module, x, q: q * torch.rsqrt(q.square().mean(-1, keepdim=True) + 1e-6),
    ],
    "queries: its factor differs from token to token": [by_position],
    "the origin of the queries was not found among the layers before the call": [
        lambda module, x, q: q * split(module.gate(x)),
        lambda module, x, q: q + split(module.gate(x)),
        lambda module, x, q: torch.randn(q.shape, generator=torch.Generator().manual_seed(2)),
    ],
}


@pytest.mark.parametrize(("reading", "between"), [(how, x) for how, many in READINGS.items() for x in many])
def test_what_cannot_be_known_is_named(reading: str, between: Any) -> None:
    torch.manual_seed(0)
    got = facts(Through(between))
    assert (got.effective_scale, got.scale_reading) == (None, reading)


@pytest.mark.parametrize("tokens_in_all", [1, 6])
@pytest.mark.parametrize("between", READINGS["normalised"][1:])
def test_over_equal_tokens_a_norm_is_not_taken_for_a_factor(between: Any, tokens_in_all: int) -> None:
    torch.manual_seed(0)
    alike = tokens(1, 1).expand(1, tokens_in_all, WIDTH)
    got = facts(Through(between), alike)
    assert (got.effective_scale, got.scale_reading) == (None, f"queries: {ONE_TOKEN}")
    plain = facts(Through(lambda module, x, q: q), alike)  # nothing lies between
    assert (plain.scale_reading, plain.effective_scale) == ("projections", pytest.approx(D_K**-0.5, rel=1e-5))


def test_what_other_tokens_showed_is_kept_over_equal_tokens() -> None:
    torch.manual_seed(0)
    model = Through(lambda module, x, q: 3.0 * q)
    with torch.no_grad(), lh.watch(model) as w:
        model(tokens(1, 6))
        w.step()
        model(tokens(1, 1).expand(1, 6, WIDTH))
        w.step()
    assert w.last.records[0].facts.effective_scale == pytest.approx(3.0 * D_K**-0.5, rel=1e-5)


class CachedKeys(WithCore):
    def __init__(self) -> None:
        super().__init__()
        self.cache: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        q, k = split(self.wq(x)), split(self.wk(x))
        self.cache.append(k)
        keys = torch.cat(self.cache, 2)
        return self.wo(join(self.inner(q, keys, torch.zeros_like(keys))))


def test_keys_after_those_of_a_cache_are_found() -> None:
    torch.manual_seed(0)
    model = CachedKeys()
    with torch.no_grad():
        model(tokens(length=30))
    got = facts(model, tokens(length=5))
    assert got.effective_scale == pytest.approx(0.25, rel=1e-5)


def test_a_frozen_model_of_equal_tokens_is_read() -> None:
    """Norms that are equal everywhere are no sign of a norm if there is one token only."""
    torch.manual_seed(0)
    got = facts(WithCore(), tokens()[:1, :1].expand(2, 24, -1))
    assert got.effective_scale == pytest.approx(0.25, rel=1e-5)


def test_results_keep_their_bits() -> None:
    torch.manual_seed(0)
    for kind in LAYOUTS.values():
        model, x = kind(1.0), tokens()
        wanted = model(x)
        with lh.watch(model):
            assert torch.equal(model(x), wanted)


def test_runs_of_earlier_versions_are_read(tmp_path: Any) -> None:
    model = Core(1.0)
    q = torch.randn(2, HEADS, 8, D_K)
    with lh.watch(model) as w:
        model(q, q, q)
    w.save(tmp_path / "run.json")
    content = json.loads((tmp_path / "run.json").read_text())
    for record in content["snapshots"][0]["records"]:
        for name in ("effective_scales", "head_parts", "configured_scale", "configured_by"):
            del record["facts"][name]
    (tmp_path / "old.json").write_text(json.dumps(content))
    assert lh.diagnose(tmp_path / "old.json") == lh.diagnose(tmp_path / "run.json")


class ByImage(WithCore):
    """One call for every image of a packed sequence, as Qwen2-VL's eager attention does it."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(w(x)) for w in (self.wq, self.wk, self.wv))
        parts = zip(*(y.chunk(2, 2) for y in (rotated(q), rotated(k), v)), strict=True)
        return self.wo(join(torch.cat([self.inner(*part) for part in parts], 2)))


def test_calls_on_parts_of_a_sequence_are_read() -> None:
    torch.manual_seed(0)
    got = facts(ByImage(3.0), tokens(batch=1, length=48))
    assert got.effective_scale == pytest.approx(0.75, rel=1e-5)


@pytest.mark.parametrize("length", [1, 2])
def test_few_tokens_are_enough(length: int) -> None:
    torch.manual_seed(0)
    got = facts(WithCore(3.0), tokens(batch=1, length=length))
    assert got.effective_scale == pytest.approx(0.75, rel=1e-5)


class AddsBias(Through):
    """A bias that is added after the projection, as in Transformer-XL."""

    def __init__(self) -> None:
        super().__init__(lambda module, x, q: q + module.u[:, None])
        self.u = nn.Parameter(torch.randn(HEADS, D_K))


def test_an_added_bias_does_not_count() -> None:
    torch.manual_seed(0)
    got = facts(AddsBias())
    assert (got.scale_reading, got.effective_scale) == ("projections", pytest.approx(0.25, rel=1e-5))


def test_a_norm_over_all_heads_is_a_norm() -> None:
    """Then the norm of one head differs from token to token."""

    class Wide(Through):
        def __init__(self) -> None:
            super().__init__(lambda module, x, q: split(module.whole(join(q))))
            self.whole = nn.RMSNorm(WIDTH, eps=1e-2)

    torch.manual_seed(0)
    assert facts(Wide()).scale_reading == "normalised"


def searches(monkeypatch: pytest.MonkeyPatch, model: nn.Module, passes: int, x: Tensor) -> list[int]:
    """The numbers of the passes after which origins were looked for."""
    searched: dict[int, None] = {}
    find = origins.find
    with torch.no_grad(), lh.watch(model) as w, monkeypatch.context() as patched:
        for n in range(1, passes + 1):
            model(x)
            patched.setattr(origins, "find", lambda *args, n=n: (searched.update({n: None}), find(*args))[1])
            w.step()
    return [*searched]


class SequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3 * HEADS, -1)).permute(1, 2, 0, 3).chunk(3, 1)
        return functional.scaled_dot_product_attention(q, k, v)


def test_origins_are_looked_for_once_and_what_has_none_at_powers_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    assert searches(monkeypatch, SequenceFirst(), 5, tokens().transpose(0, 1)) == [1]
    gated = Through(lambda module, x, q: q * split(module.gate(x)))
    assert searches(monkeypatch, gated, 9, tokens()) == [1, 2, 4, 8]


def test_a_norm_that_is_gone_is_noticed_at_once() -> None:
    def until(module: Through, x: Tensor, q: Tensor) -> Tensor:
        return functional.normalize(q + split(module.gate(x)), dim=-1) if normalised else q

    torch.manual_seed(0)
    model, normalised = Through(until), True
    with torch.no_grad(), lh.watch(model) as w:
        for _ in range(5):
            model(tokens())
            w.step()
            assert w.last.records[0].facts.scale_reading == "normalised"
        normalised = False
        model(tokens())
        assert w.last.records[0].facts.effective_scale == pytest.approx(D_K**-0.5, rel=1e-5)


class OwnCode(nn.MultiheadAttention):
    """Inherits the weights of torch's module, and attends by itself."""

    def heads(self, x: Tensor) -> list[Tensor]:
        return [split(y) for y in functional.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)]

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.heads(x)
        return join((q @ k.mT * WIDTH**-0.5).softmax(-1) @ v)


class ScaledTwice(OwnCode):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.heads(x)
        return join(functional.scaled_dot_product_attention(q * D_K**-0.5, k, v))


class TorchsCode(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize(
    ("kind", "scale", "reading"),
    [
        (OwnCode, WIDTH**-0.5, "projections"),
        (ScaledTwice, 1 / D_K, "projections"),
        (TorchsCode, D_K**-0.5, "torch's own module"),
    ],
)
def test_code_of_its_own_under_torchs_weights_is_read(kind: type[nn.Module], scale: float, reading: str) -> None:
    torch.manual_seed(0)
    got = facts(kind(WIDTH, HEADS, batch_first=True), passes=3)
    assert (got.d_k, got.scale_reading) == (D_K, reading)
    assert got.effective_scale == pytest.approx(scale, rel=1e-5)


class Flex(nn.Module):
    def __init__(self, score_mod: Any) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.score_mod = score_mod

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(w(x)) for w in (self.q, self.k, self.v))
        shown = create_block_mask(lambda b, h, i, j: i >= j, None, None, x.shape[1], x.shape[1], device="cpu")
        return join(flex_attention(q, k, v, score_mod=self.score_mod, block_mask=shown))


SCORE_MODS: list[tuple[Any, tuple[float, ...] | None]] = [
    (lambda s, b, h, i, j: s * D_K**-0.5, (1 / D_K,)),
    (lambda s, b, h, i, j: s + (j - i) * 0.1, (D_K**-0.5,)),
    (lambda s, b, h, i, j: 30 * torch.tanh(s / 30), (D_K**-0.5,)),
    (lambda s, b, h, i, j: s * torch.where(j > i, 5.0, 2.0), (2 * D_K**-0.5,)),  # the mask hides the others
    (lambda s, b, h, i, j: torch.where(i >= j, s * (1 + h), -torch.inf), tuple(n * D_K**-0.5 for n in (1, 2, 3, 4))),
    (lambda s, b, h, i, j: s * (1 + j), None),
]


@pytest.mark.parametrize(("score_mod", "expected"), SCORE_MODS)
def test_a_function_of_the_scores_is_part_of_the_scale(score_mod: Any, expected: tuple[float, ...] | None) -> None:
    torch.manual_seed(0)
    got = facts(Flex(score_mod))
    if expected is None:
        assert (got.effective_scale, got.scale_reading) == (None, "a score_mod changes it")
        return
    assert got.scale_reading == "projections"
    each = got.effective_scales or (got.effective_scale,)
    assert each == pytest.approx(expected, rel=1e-4)
