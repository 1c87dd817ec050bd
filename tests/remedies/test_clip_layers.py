"""Remedies of modules that attend several times in a run, and of layers that run now and then."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor, nn

import levelhead as lh
from levelhead.remedies import QKClip, qk_norm, softcap

WIDTH, D, TAU = 16, 4, 3.0


def batch(seed: int = 1) -> Tensor:
    return torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(seed))


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, D)).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


KEPT = F.scaled_dot_product_attention  # a name that no code gives away


class Projections(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(WIDTH, WIDTH))

    def of(self, x: Tensor, *names: str) -> list[Tensor]:
        return [heads(getattr(self, name)(x)) for name in names]


class Differential(Projections):
    """The difference of two softmaxes, of two halves of the heads."""

    def __init__(self) -> None:
        super().__init__("q", "k", "v")

    def between(self) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.of(x, "q", "k", "v")
        first = attend(q[:, :2], k[:, :2], v[:, :2])
        self.between()
        return first - 0.5 * F.scaled_dot_product_attention(q[:, 2:], k[:, 2:], v[:, 2:])


class Broken(Differential):
    def between(self) -> None:
        torch._dynamo.graph_break()


class SelfAndCross(Projections):
    def __init__(self) -> None:
        super().__init__("q", "k", "v", "q2", "k2", "v2")

    def forward(self, x: Tensor) -> Tensor:
        y = x.flip(0)[:, :5]
        own, (q,), (k, v) = self.of(x, "q", "k", "v"), self.of(x, "q2"), self.of(y, "k2", "v2")
        return attend(*own) + F.scaled_dot_product_attention(q, k, v)


class Loop(nn.Module):
    """All layers of a model in one module: one place in the code attends."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))

    def forward(self, x: Tensor, layers: int = 2) -> Tensor:
        for projection in self.qkv[:layers]:
            q, k, v = map(heads, projection(x).chunk(3, -1))
            x = x + attend(q, k, v).transpose(1, 2).flatten(2)
        return x


class Halves(Differential):
    """The same projections, other rows of them each time, at one place: which rows is not known."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.of(x, "q", "k", "v")
        return torch.stack([attend(q[:, at], k[:, at], v[:, at]) for at in (slice(2), slice(2, 4))]).sum(0)


class Block(Projections):
    def __init__(self) -> None:
        super().__init__("q", "k", "v")

    def forward(self, x: Tensor) -> Tensor:
        return attend(*self.of(x, "q", "k", "v")).transpose(1, 2).flatten(2)


class Renamed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return KEPT(*self.of(x, "q", "k", "v"))


class Holding(Block):
    def __init__(self) -> None:
        super().__init__()
        self.function = F.scaled_dot_product_attention

    def forward(self, x: Tensor) -> Tensor:
        return self.function(*self.of(x, "q", "k", "v"))


class Grouped(nn.Module):
    """Two heads of keys for four of queries: repeated where there is a mask, as transformers does it, else not."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, features) for features in (4 * D, 2 * D, 2 * D))

    def forward(self, x: Tensor, repeated: bool) -> Tensor:
        q, k, v = (heads(project(x)) for project in (self.q, self.k, self.v))
        if not repeated:
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        return F.scaled_dot_product_attention(q, *(y.repeat_interleave(2, 1) for y in (k, v)), attn_mask=mask)


class Dropped(nn.Module):
    """Some layers are left out in some passes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, left_out: int = -1) -> Tensor:
        for n, layer in enumerate(self.layers):
            x = x if n == left_out else layer(x)
        return x


def made(kind: Callable[[], nn.Module], grown: str = "") -> Any:
    torch.manual_seed(0)
    model = kind()
    with torch.no_grad():
        for name, x in model.named_parameters():
            if grown and name.startswith(grown) and name.endswith("weight"):
                x[: 2 * WIDTH] *= 6.0  # queries and keys of a joint projection
    return model


def maxima(model: nn.Module, x: Tensor) -> np.ndarray[Any, Any]:
    """The largest logit of every head, at one place after the other."""
    found: list[Any] = []
    with lh.watch(model, rows=None, deep=False) as watch:
        watch.listeners.append(lambda watched, call, tally, q, k: found.append((q @ k.mT).amax((0, 2, 3)) / D**0.5))
        model(x)
    return torch.cat(found).detach().numpy()


@pytest.mark.parametrize(
    ("kind", "grown", "layers"),
    [
        (Differential, ("q.", "k."), {"", " (call 2)"}),
        (SelfAndCross, ("q2", "k2"), {" (call 2)"}),
        (SelfAndCross, ("q.", "k."), {""}),
        (Loop, ("qkv.1",), {" (qkv.1)"}),
    ],
)
def test_each_call_of_a_module_has_rows_of_its_own(kind: Any, grown: Any, layers: set[str]) -> None:
    model, x = made(kind, grown), batch()
    before = maxima(model, x)
    assert before.max() > 2 * TAU
    with QKClip(model, TAU) as clip:
        model(x)
        said = clip()
        assert {name for name, _ in said.heads} == layers
        assert clip.verify(x)
        model(x)
        assert len(clip()) == 0
    np.testing.assert_allclose(maxima(model, x), np.minimum(before, TAU), rtol=1e-4)


@pytest.mark.parametrize("kind", [Broken, Halves])
def test_calls_that_cannot_be_told_apart_are_refused_where_one_is_above(kind: Any) -> None:
    torch._dynamo.reset()
    for grown in ((), ("q.", "k.")):
        model, x = made(kind, grown), batch()
        ready = torch.compile(model, backend="eager") if kind is Broken else model
        before = {name: x.clone() for name, x in model.state_dict().items()}
        with QKClip(model, TAU, batch=x) as clip:
            ready(x)
            if not grown:
                assert len(clip()) == 0
                continue
            with pytest.raises(lh.LevelheadError, match="they come from elsewhere"):
                clip()
        assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("kind", [Differential, SelfAndCross, Loop])
def test_a_norm_of_one_call_is_none_of_the_other(kind: Any) -> None:
    model = made(kind)
    with pytest.raises(lh.LevelheadError, match="attends several times, from other rows each time"):
        qk_norm(model, batch())
    assert not any("norm" in name for name in model.state_dict())


def test_a_layer_that_runs_later_than_others_is_clipped_then() -> None:
    model, x = made(Dropped, "layers"), batch()
    with QKClip(model, TAU) as clip:
        for left_out in (2, 2, -1):
            with torch.no_grad():
                model(x, left_out)
            said = clip()
        assert {name for name, _ in said.heads} >= {"layers.2"}
    loop = made(Loop, "qkv")
    with QKClip(loop, TAU) as clip:
        for layers in (1, 1, 2):
            loop(x, layers)
            said = clip()
        assert {name for name, _ in said.heads} == {" (qkv.1)"}


def test_a_check_does_not_change_the_next_clip() -> None:
    def clipped(checked: bool) -> Any:
        model = made(Block, ("q", "k"))
        with QKClip(model, TAU) as clip:
            model(batch())
            clip()
            model(batch())
            if checked:
                with pytest.raises(lh.remedies.NotInForceError):
                    clip.verify(batch(7) * 3)
            return clip(), model.state_dict()

    (alone, wanted), (said, found) = clipped(False), clipped(True)
    assert said.largest == alone.largest and said.heads == alone.heads
    assert all(torch.equal(found[name], x) for name, x in wanted.items())


@pytest.mark.parametrize("kind", [Renamed, Holding])
def test_a_function_by_another_name_is_found(kind: Any) -> None:
    model, x = made(kind, ("q", "k")), batch()
    with QKClip(model, TAU) as clip:
        model(x)
        assert len(clip()) > 0
    with softcap(model, 2.0) as remedy:
        assert remedy.verify(x)
    with pytest.raises(lh.LevelheadError, match="none in Linear"):
        QKClip(nn.Linear(2, 2))


class Late(Tensor):
    """As results of a collective that is under way: a tensor that a watch does not read."""


def test_calls_that_were_not_observed_are_named_with_the_reason() -> None:
    model = made(Block)
    for projection in (model.q, model.k):
        projection.register_forward_hook(lambda module, given, out: out.as_subclass(Late))
    with QKClip(model, TAU) as clip:
        model(batch())
        with pytest.raises(lh.LevelheadError, match="got none yet: .* type Late, whose numbers cannot be read"):
            clip()


def test_a_layer_that_is_never_seen_beside_others_is_named_once() -> None:
    model = made(lambda: nn.Sequential(Block(), Block()), ("0.q", "0.k"))
    for projection in (model[1].q, model[1].k):
        projection.register_forward_hook(lambda module, given, out: out.as_subclass(Late))
    with QKClip(model, TAU) as clip:
        model(batch())
        with pytest.warns(UserWarning, match="QKClip: 1 is never clipped, .* type Late, whose numbers"):
            assert {name for name, _ in clip().heads} == {"0"}
        model(batch())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            clip()


def clipped_over(*forms: bool, tau: float = TAU, every_pass: bool = False) -> dict[str, Tensor]:
    """Weights of a model with grouped keys after passes in these forms, and a clip after the last, or after each."""
    torch.manual_seed(0)
    model = Grouped()
    with torch.no_grad():
        model.q.weight[D : 2 * D] *= 40.0
    clip = QKClip(model, tau)
    for place, repeated in enumerate(forms):
        model(batch(), repeated)
        if every_pass or place + 1 == len(forms):
            clip()
    clip.undo()
    return {name: x.detach().clone() for name, x in model.named_parameters()}


@pytest.mark.parametrize("every_pass", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_keys_that_are_repeated_in_some_passes_are_clipped_as_in_one_form(first: bool, every_pass: bool) -> None:
    before = clipped_over(first, tau=1e9)
    alone = clipped_over(first, first, first, every_pass=every_pass)
    both = clipped_over(first, not first, first, every_pass=every_pass)
    for name, x in both.items():
        torch.testing.assert_close(x, alone[name], rtol=1e-5, atol=1e-7)
    changed = (both["q.weight"] != before["q.weight"]).any(1)
    assert changed.nonzero()[:, 0].tolist() == list(range(D, 2 * D))
    assert torch.equal(both["k.weight"], before["k.weight"])
    clipped_over(first, not first, tau=1e9)  # nothing to clip


class OtherHeads(Projections):
    """Its queries and keys have as many heads as a call asks for."""

    def __init__(self) -> None:
        super().__init__("q", "k", "v")

    def forward(self, x: Tensor, width: int) -> Tensor:
        q, k, v = (getattr(self, name)(x).unflatten(-1, (-1, width)).transpose(1, 2) for name in "qkv")
        return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize(("first", "then"), [(4, 8), (8, 4), (4, 2)])
def test_heads_of_another_width_are_refused_only_where_one_is_above(first: int, then: int) -> None:
    torch.manual_seed(0)
    model = OtherHeads()
    clip = QKClip(model, 1e9)
    for width in (first, then):
        model(batch(), width)
        clip()
    clip.tau = 1e-3
    model(batch(), then)
    with pytest.raises(ValueError, match=r"heads at first, then with|no longer what its projections put out"):
        clip()
    clip.undo()
