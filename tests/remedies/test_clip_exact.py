"""QK-clip where its factor is not the whole of it: values from the keys' rows, added biases, caps, half precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor, nn

import levelhead as lh
from levelhead.remedies import QKClip

WIDTH, HEADS = 32, 4


class Attention(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.q_proj, self.k_proj, self.v_proj, self.gate = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        with torch.no_grad():
            for each in (self.q_proj, self.k_proj):
                each.weight.mul_(4.0)

    def projected(self, x: Tensor) -> list[Tensor]:
        return [p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(*self.projected(x))


def batch() -> Tensor:
    return torch.randn(2, 10, WIDTH, generator=torch.Generator().manual_seed(1))


def largest(model: Any, x: Tensor) -> float:
    with torch.no_grad():
        q, k, _ = model.projected(x)
    return float((q.double() @ k.double().mT).max() / math.sqrt(WIDTH / HEADS))


# ---- values that come from the rows of keys or queries


class KeysAreValues(Attention):
    """Without a projection of values, behind one that has nothing to do with them."""

    def __init__(self) -> None:
        super().__init__()
        del self.v_proj

    def projected(self, x: Tensor) -> list[Tensor]:
        self.gate(x)
        q, k = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj))
        return [q, k, k]


class Joint(Attention):
    """One projection of queries and keys, whose keys are the values."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Linear(WIDTH, 2 * WIDTH)
        nn.init.normal_(self.qk.weight)
        del self.q_proj, self.k_proj, self.v_proj

    def projected(self, x: Tensor) -> list[Tensor]:
        q, k = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qk(x).chunk(2, -1))
        return [q, k, k]


def tied_module() -> Attention:
    model = Attention()
    model.v_proj = model.k_proj
    return model


def tied_weight() -> Attention:
    model = Attention()
    model.v_proj.weight = model.k_proj.weight
    return model


def tied_to_queries() -> Attention:
    model = Attention()
    model.v_proj = model.q_proj
    return model


@pytest.mark.parametrize("make", [tied_module, tied_weight, tied_to_queries, KeysAreValues, Joint])
def test_a_clip_leaves_values_that_come_from_the_rows_of_keys_or_queries(make: Callable[[], Attention]) -> None:
    model = make()
    values = model.projected(batch())[2].detach().clone()
    with QKClip(model, 2.0) as clip:
        model(batch())
        assert len(clip()) == HEADS
    assert torch.equal(model.projected(batch())[2], values)
    assert largest(model, batch()) == pytest.approx(2.0, rel=1e-4)


def test_queries_keys_and_values_of_one_projection_are_refused() -> None:
    model = Attention()
    model.k_proj = model.v_proj = model.q_proj
    with QKClip(model, 2.0) as clip:
        model(batch())
        with pytest.raises(lh.LevelheadError, match="the values come from the rows of q and k"):
            clip()


# ---- what is not a product of q and k


class ByHand(Attention):
    """A softmax by hand, with a bias for far keys as ALiBi has, or without."""

    slope = 0.0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projected(x)
        away = torch.arange(10.0)[None, :] - torch.arange(10.0)[:, None]
        hidden = torch.full((10, 10), -math.inf).triu(1)
        return torch.softmax(q @ k.mT * 0.3 + self.slope * away + hidden, -1) @ v


@pytest.mark.parametrize("slope", [0.0, 0.5])
def test_a_bias_within_a_softmax_by_hand_is_listed(slope: float) -> None:
    model = ByHand()
    model.slope = slope
    with QKClip(model, 2.0) as clip:
        model(batch())
        found = clip()
    assert len(found) == HEADS
    assert list(found.inexact) == ([""] if slope else [])
    assert ("is added to its products" in str(found)) == bool(slope)


class Capped(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return lh.torch.observed_attention(q, k, v, softcap=50.0)[0]


def test_logits_at_their_cap_are_listed_until_they_are_known() -> None:
    model = Capped()
    with torch.no_grad():
        model.q_proj.weight.mul_(100.0)
    with QKClip(model, 30.0) as clip:
        model(batch())
        found = clip()
        assert "at their cap of 50" in found.inexact[""]
        for _ in range(3):
            model(batch())
            found = clip()
    assert not found and not found.inexact and found.largest == pytest.approx(30.0, rel=1e-4)


# ---- half precision


@pytest.mark.parametrize(("dtype", "below"), [(torch.bfloat16, 0.03), (torch.float16, 0.004)])
def test_clips_of_half_precision_end_near_the_bound(dtype: torch.dtype, below: float) -> None:
    for seed in range(4):
        model = Attention(seed).to(dtype)
        x = batch().to(dtype)
        with QKClip(model, 10.0) as clip:
            steps = []
            for _ in range(4):
                model(x)
                steps.append(clip())
            assert len(steps[0]) and not steps[-1]
            assert 10.0 * (1 - below) < steps[-1].largest <= 10.0 * (1 + 1e-5)
            clip.verify(x)


def test_a_factor_that_rounds_away_changes_half_precision() -> None:
    model = Attention().bfloat16()
    x = batch().bfloat16()
    top = largest(model, x)
    with QKClip(model, top * 0.999) as clip:
        model(x)
        assert len(clip()) == 1
    assert largest(model, x) < top


# ---- a softmax by hand in a class that is not called attention


class Mixer(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def test_a_softmax_by_hand_beside_a_function_is_clipped_too() -> None:
    first, second = Attention(), Mixer(seed=1)
    model = nn.ModuleDict({"attn": first, "mixer": second})
    model.forward = lambda x: second(first(x).transpose(1, 2).flatten(2))  # type: ignore[method-assign]
    x = batch()
    with QKClip(model, tau=0.5) as clip:
        model(x)
        assert {name for name, _ in clip.step().heads} == {"attn", "mixer"}
        for _ in range(3):  # the second layer sees other inputs once the first was clipped
            model(x)
            clip.step()
    with torch.no_grad():
        inputs = first(x).transpose(1, 2).flatten(2)
    assert largest(first, x) <= 0.5001 and largest(second, inputs) <= 0.5001
