"""QK-clip and what else touches weights: adapters, frozen layers, masters, quantisation, compilers, optimisers."""

from __future__ import annotations

import copy
import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor, nn

import levelhead as lh
from levelhead.remedies import QKClip, qk_norm

WIDTH, HEADS = 32, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        split = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = split
        k = k if self.k_norm is None else self.k_norm(k)  # q_norm is never called
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


class Adapted(nn.Module):
    """LoRA by hand: it adds nothing until it has learned."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def made(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.ModuleDict({"attn": Attention()})
    model.forward = lambda x: model["attn"](x)  # type: ignore[method-assign]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    return model


def batch(seed: int = 1) -> Tensor:
    return torch.randn(2, 10, WIDTH, generator=torch.Generator().manual_seed(seed))


def maxima(model: nn.Module, x: Tensor) -> Any:
    with torch.no_grad(), lh.watch(model) as w:
        model(x)
    return w.last.records[0].heads.max_logit


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in model.state_dict().items()}


def changed(model: nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {name for name, x in model.state_dict().items() if not torch.equal(x, before[name])}


# ---- what is added to a projection


def by_peft(model: nn.Module) -> nn.Module:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj"])
    adapted: nn.Module = peft.inject_adapter_in_model(config, model)
    return adapted


def by_hand(model: nn.Module) -> nn.Module:
    for name in ("q_proj", "k_proj"):
        setattr(model["attn"], name, Adapted(getattr(model["attn"], name)))
    return model


@pytest.mark.parametrize("adapt", [by_peft, by_hand])
def test_an_adapter_that_adds_nothing_yet_is_refused_by_name(adapt: Callable[[nn.Module], nn.Module]) -> None:
    model = adapt(made())
    before = state(model)
    with QKClip(model, 0.1) as clip:
        model(batch())
        with pytest.raises(lh.LevelheadError, match="'attn', where .*q_proj adds to its projection"):
            clip()
    assert not changed(model, before)


def test_what_begins_to_be_added_later_is_noticed() -> None:
    """A bias of 0 beside the projection fits at first, and no more once it is learned."""
    model = made()
    shift = nn.Parameter(torch.zeros(2, HEADS, 1, WIDTH // HEADS))

    def forward(x: Tensor) -> Tensor:
        own = model["attn"]
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (own.q_proj, own.k_proj, own.v_proj))
        return F.scaled_dot_product_attention(q + shift[0], k + shift[1], v)

    model["attn"].forward = forward  # type: ignore[method-assign]
    with QKClip(model, float(maxima(model, batch()).min()) / 2) as clip:
        model(batch())
        assert len(clip()) == HEADS
        with torch.no_grad():
            shift += 3.0
        before = state(model)
        model(batch())
        with pytest.raises(lh.LevelheadError, match="no longer what its projections put out"):
            clip()
        assert not changed(model, before)


# ---- norms, by their effect and not by their names


def test_a_norm_of_keys_alone_leaves_the_queries_to_take_the_factor() -> None:
    model = made()
    model["attn"].k_norm = nn.RMSNorm(WIDTH // HEADS)
    before, tau = state(model), float(maxima(model, batch()).min()) / 2
    with QKClip(model, tau) as clip:
        model(batch())
        assert len(clip()) == HEADS
    assert changed(model, before) == {"attn.q_proj.weight", "attn.q_proj.bias"}
    np.testing.assert_allclose(maxima(model, batch()), tau, rtol=1e-4)


def test_a_norm_that_is_never_called_is_none() -> None:
    model = made()
    model["attn"].q_norm = nn.RMSNorm(WIDTH // HEADS)
    with QKClip(model, tau := float(maxima(model, batch()).min()) / 2) as clip:
        model(batch())
        assert len(clip()) == HEADS
    np.testing.assert_allclose(maxima(model, batch()), tau, rtol=1e-4)


# ---- frozen, quantised, copied


def test_frozen_rows_keep_their_bits_and_the_others_take_the_factor() -> None:
    for frozen, other in (("q", "k"), ("k", "q")):
        model = made()
        getattr(model["attn"], f"{frozen}_proj").requires_grad_(False)
        before, tau = state(model), float(maxima(model, batch()).min()) / 2
        with QKClip(model, tau) as clip:
            model(batch())
            assert len(clip()) == HEADS
        assert changed(model, before) == {f"attn.{other}_proj.{kind}" for kind in ("weight", "bias")}
        np.testing.assert_allclose(maxima(model, batch()), tau, rtol=1e-4)


def test_rows_that_are_frozen_on_the_way_keep_their_bits_from_then_on() -> None:
    model = made()
    with QKClip(model, 3.0) as clip:
        model(batch())
        assert len(clip()) == HEADS
        model["attn"].q_proj.requires_grad_(False)
        before = state(model)
        model(3 * batch())
        assert len(clip()) == HEADS
        assert changed(model, before) == {"attn.k_proj.weight", "attn.k_proj.bias"}
        model(3 * batch())
        assert clip().largest == pytest.approx(3.0, rel=1e-4)


def test_a_frozen_layer_is_left_and_named_while_others_are_clipped() -> None:
    model = nn.Sequential(made()["attn"], made(1)["attn"])
    model[0].requires_grad_(False)
    before = state(model)
    with QKClip(model, 1e-3) as clip, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            model(batch())
            said = clip()
    assert {name for name, _ in said.left} == {"0"} and "0.q_proj.weight is frozen" in str(said)
    assert {name.split(".")[0] for name in changed(model, before)} == {"1"}
    assert len([x for x in warned if "not clipped: 0.q_proj.weight is frozen" in str(x.message)]) == 1
    model.requires_grad_(False)
    with QKClip(model, 1e-3) as clip:
        model(batch())
        with pytest.raises(lh.LevelheadError, match="trained q or k projections, got 0.q_proj.weight is frozen"):
            clip()


class Quantised(nn.Linear):
    """Weights of one byte each, and a scale."""

    def __init__(self, of: nn.Linear) -> None:
        super().__init__(WIDTH, WIDTH)
        self.step = float(of.weight.detach().abs().max()) / 127
        self.weight = nn.Parameter((of.weight.detach() / self.step).round().to(torch.int8), requires_grad=False)
        self.bias = of.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.float() * self.step, self.bias)


def test_quantised_weights_are_refused_by_name() -> None:
    model = made()
    for name in ("q_proj", "k_proj"):
        setattr(model["attn"], name, Quantised(getattr(model["attn"], name)))
    with QKClip(model, 0.1) as clip:
        model(batch())
        with pytest.raises(lh.LevelheadError, match=r"'attn', where 'attn.q_proj' is quantised \(torch.int8\)"):
            clip()


class Convolved(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = (self.turned(nn.Conv1d(WIDTH, WIDTH, 1)) for _ in range(2))

    def turned(self, convolution: nn.Conv1d) -> Any:
        convolution.register_forward_pre_hook(lambda module, args: (args[0].mT,))
        convolution.register_forward_hook(lambda module, args, out: out.mT)
        return convolution


def test_convolutions_are_refused_as_what_they_are() -> None:
    model = nn.Sequential(Convolved())
    with QKClip(model, 0.01) as clip:
        model(batch())
        with pytest.raises(ValueError, match=r"q_proj' \(Conv1d\) is a convolution of width 1, and only linear"):
            clip()


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
def test_weights_that_are_computed_are_refused_by_name(norm: Any) -> None:
    model = made()
    for name in ("q_proj", "k_proj"):
        norm(getattr(model["attn"], name))
    with QKClip(model, 0.1) as clip:
        model(batch())
        with pytest.raises(lh.LevelheadError, match=r"'q_proj' \(ParametrizedLinear\) has no plain weight") as refused:
            clip()
    assert "batch=" not in str(refused.value)


def test_an_optimiser_that_writes_its_masters_back_is_named() -> None:
    model = made().bfloat16()
    masters = [x.detach().float().requires_grad_() for x in model.parameters()]
    optimiser = torch.optim.AdamW(masters, lr=1e-3)
    with QKClip(model, 1.0) as clip:
        for _ in range(2):
            model(batch().bfloat16()).square().mean().backward()
            for master, x in zip(masters, model.parameters(), strict=True):
                master.grad = x.grad.float()
            optimiser.step()
            with torch.no_grad():
                for master, x in zip(masters, model.parameters(), strict=True):
                    x.copy_(master)
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                said = clip()
    assert said.undone == ("attn",) and "overwritten since the last clip: attn" in str(said)
    assert "float32 masters" in str(warned[0].message)


class Mastered(torch.optim.SGD):
    """Keeps float32 masters in its state, as fused optimisers do."""

    def step(self, closure: Any = None) -> None:
        for x in self.param_groups[0]["params"]:
            master = self.state[x].setdefault("master", x.detach().float())
            with torch.no_grad():
                x.copy_(master.sub_(x.grad.float(), alpha=self.param_groups[0]["lr"]))


def test_a_master_in_the_optimisers_state_is_named() -> None:
    model = made().bfloat16()
    optimiser = Mastered(model.parameters(), lr=1e-4)
    with QKClip(model, 1.0) as clip, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            model(batch().bfloat16()).square().mean().backward()
            optimiser.step()
            said = clip()
    assert said.undone == ("attn",)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_step_that_grows_back_what_a_clip_took_is_no_master(kind: Any) -> None:
    """Where logits grow steadily, every step brings back the numbers of before the clip, in direction and size."""
    model = made()
    model["attn"].k_proj.requires_grad_(False)
    optimiser = kind(model["attn"].q_proj.parameters(), lr=0.1)
    rows: dict[str, Tensor] = {}
    with QKClip(model, 3.0) as clip:
        for _ in range(30):
            model(batch())
            for name, x in model["attn"].q_proj.named_parameters():
                x.grad = -rows.setdefault(name, x.detach().sign())
            optimiser.step()
            assert (said := clip()).undone == () and len(said) == HEADS


# ---- optimisers and the compiler


@pytest.mark.parametrize("kind", ["AdamW", "Muon"])
def test_optimisers_keep_their_moments_and_logits_stay_below(kind: str) -> None:
    model, tau = made(), 3.0
    matrices = [x for x in model.parameters() if x.dim() == 2]
    others = [x for x in model.parameters() if x.dim() != 2]
    optimisers: list[Any] = [torch.optim.AdamW(others if kind == "Muon" else model.parameters(), lr=1e-2)]
    optimisers += [torch.optim.Muon(matrices, lr=1e-2)] if kind == "Muon" else []
    with QKClip(model, tau) as clip:
        said = []
        for step in range(5):
            for micro in range(2):
                (-model(batch(step * 2 + micro)).square().mean()).backward()
            for optimiser in optimisers:
                optimiser.step()
                optimiser.zero_grad()
            kept = [copy.deepcopy(optimiser.state_dict()) for optimiser in optimisers]
            said.append(clip())
            assert [str(optimiser.state_dict()) for optimiser in optimisers] == [str(x) for x in kept]
    assert said[0].largest > 2 * tau and said[-1].largest < 2 * tau and all(x.undone == () for x in said)


def test_nothing_of_a_pass_stays_in_memory() -> None:
    model = nn.Sequential(made()["attn"], made(1)["attn"], nn.Linear(WIDTH, 500))
    with QKClip(model, 1.0) as clip:
        for _ in range(2):
            before = weakref.ref(out := model(batch()))
            out.square().mean().backward()
            del out
            assert before() is None and not clip._probe._ran
        with torch.inference_mode():
            model(batch())
        assert len(clip()) == 2 * HEADS


def test_a_running_average_is_a_plain_copy_whose_passes_do_not_count() -> None:
    model = nn.Sequential(made()["attn"])
    with QKClip(model, 3.0) as clip:
        average = torch.optim.swa_utils.AveragedModel(model)
        assert not any(module._forward_hooks for module in average.modules())
        model(batch())
        assert len(clip()) == HEADS
        average(100 * batch())
        assert clip().largest == -math.inf
        torch.testing.assert_close(average.module[0].q_proj.weight, made()["attn"].q_proj.weight)


def test_a_compiled_model_is_not_compiled_again_by_a_clip() -> None:
    model = nn.Sequential(made()["attn"])
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend="aot_eager")
    with QKClip(compiled, 1.0, batch=batch()) as clip:
        compiled(batch()).square().mean().backward()
        assert len(clip()) == HEADS
        with torch.compiler.set_stance("fail_on_recompile"):
            for _ in range(2):
                compiled(batch()).square().mean().backward()
                clip()
        assert clip().largest == -math.inf
    model[0].compile(backend="aot_eager")  # in place, block by block, as trainers do
    with QKClip(model, 0.1, batch=batch()) as clip:
        model(batch())
        assert len(clip()) == HEADS


# ---- gains of QK-norm and the optimiser


def test_gains_that_no_optimiser_has_are_named_before_its_first_step() -> None:
    model = made()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    with qk_norm(model, batch()):
        model(batch()).square().mean().backward()
        with pytest.raises(lh.LevelheadError, match="AdamW, which trains the projections of 'attn' and no gain"):
            optimiser.step()
    with qk_norm(model, batch(), optimizer=optimiser):
        model(batch()).square().mean().backward()
        optimiser.step()
        gain = model.state_dict()["attn.q_norm.weight"]
        assert not torch.equal(gain, torch.ones_like(gain)) and optimiser.param_groups[-1]["weight_decay"] == 0
        assert optimiser.param_groups[-1]["lr"] == 1e-2
    with qk_norm(made(), batch()):
        optimiser.step()  # of another model
    muon = torch.optim.Muon([model["attn"].q_proj.weight, model["attn"].k_proj.weight])
    for wrong in (muon, torch.optim.SGD([torch.ones(1)], lr=1.0), "adam"):
        with pytest.raises(lh.LevelheadError, match="optimizer: expected"):
            qk_norm(made() if wrong is not muon else model, batch(), optimizer=wrong)
