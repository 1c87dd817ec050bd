"""Remedies: each on every kind of model, its proof, its sabotage, and the way back."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the usual name
import transformers
from torch import Tensor, nn

import levelhead as lh
from levelhead.remedies import NotInForceError, QKClip, qk_norm, rescale, softcap
from levelhead.watching import amend
from levelhead.watching.intercept import INTERCEPTION
from levelhead.watching.watch import Watch

WIDTH, HEADS, TOKENS = 32, 4, 10


class Plain(nn.Module):
    """Separate projections and torch's function."""

    def __init__(self, kv_heads: int = HEADS, bias: bool = True) -> None:
        super().__init__()
        self.num_heads, d_k = HEADS, WIDTH // HEADS
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, kv_heads * d_k, bias) for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(out.transpose(1, 2).flatten(2))


class Fused(nn.Module):
    """One projection, laid out in one of several ways."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout, self.num_heads = layout, HEADS
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def columns(self) -> Tensor:
        """(3, heads, d_k): where q, k and v are."""
        every = torch.arange(3 * WIDTH)
        return {
            "q k v": lambda: every.reshape(3, HEADS, -1),
            "k v q": lambda: every.reshape(3, HEADS, -1)[[2, 0, 1]],
            "per head": lambda: every.reshape(HEADS, 3, -1).transpose(0, 1),
            "innermost": lambda: every.reshape(HEADS, -1, 3).permute(2, 0, 1),
            "two groups": lambda: every.reshape(2, 3, HEADS // 2, -1).transpose(0, 1).reshape(3, HEADS, -1),
        }[self.layout]()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)[..., self.columns()].permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


class Torchs(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, x, x, need_weights=False)[0]


class ByHand(nn.Module):
    """A softmax by hand, without a function."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = _ByHandAttention()

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x)


class _ByHandAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        p = (q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)).softmax(-1)
        return self.out((p @ v).transpose(1, 2).flatten(2))


def floats() -> Tensor:
    return torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))


def ids() -> Tensor:
    return torch.randint(1, 60, (2, TOKENS), generator=torch.Generator().manual_seed(1))


def hugging_face(name: str, implementation: str, layers: int = 2) -> nn.Module:
    sizes = dict(
        vocab_size=64,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        intermediate_size=32,
        num_hidden_layers=layers,
        attention_dropout=0.0,
    )
    kinds: dict[str, Any] = {
        "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, {**sizes, "num_key_value_heads": 2}),
        "bert": (transformers.BertModel, transformers.BertConfig, sizes),
        "neox": (transformers.GPTNeoXForCausalLM, transformers.GPTNeoXConfig, sizes),
        "gpt2": (
            transformers.GPT2LMHeadModel,
            transformers.GPT2Config,
            dict(vocab_size=64, n_embd=WIDTH, n_layer=layers, n_head=HEADS, bos_token_id=0, eos_token_id=0),
        ),
        "qwen3": (
            transformers.Qwen3ForCausalLM,
            transformers.Qwen3Config,
            {**sizes, "num_key_value_heads": 2, "head_dim": 8},
        ),
    }
    model, config, options = kinds[name]
    made: nn.Module = model._from_config(config(**options), attn_implementation=implementation)
    return made.eval()


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval()


Made = tuple[nn.Module, Tensor]
HUGGING_FACE = (
    ("llama", "sdpa"),
    ("llama", "eager"),
    ("gpt2", "sdpa"),
    ("gpt2", "eager"),
    ("bert", "sdpa"),
    ("bert", "eager"),
    ("neox", "sdpa"),
)
KINDS: dict[str, Callable[[], Made]] = {
    "plain": lambda: (Plain(), floats()),
    "grouped": lambda: (Plain(kv_heads=2), floats()),
    "fused": lambda: (Fused("q k v"), floats()),
    "fused per head": lambda: (Fused("per head"), floats()),
    "nn.MultiheadAttention": lambda: (Torchs(), floats()),
    "nn.TransformerEncoder": lambda: (encoder(), floats()),
    "levelhead": lambda: (lh.torch.MultiHeadAttention(WIDTH, HEADS, kv_heads=2, rotary=1e4), floats()),
    **{
        f"{name} {implementation}": lambda n=name, i=implementation: (hugging_face(n, i), ids())
        for name, implementation in HUGGING_FACE
    },
}
FUSED = ("q k v", "k v q", "per head", "innermost", "two groups")


@pytest.fixture(params=KINDS)
def made(request: pytest.FixtureRequest) -> Made:
    torch.manual_seed(0)
    model, batch = KINDS[request.param]()
    return model.eval(), batch


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Any:
    original = F.scaled_dot_product_attention
    yield
    assert F.scaled_dot_product_attention is original
    assert INTERCEPTION._holders == 0
    assert not amend._stack.running and not amend._traced
    assert torch.backends.mha.get_fastpath_enabled()


def output(model: nn.Module, batch: Tensor) -> Tensor:
    found = model(batch)
    return found if isinstance(found, Tensor) else found[0]


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def maxima(model: nn.Module, batch: Tensor, **options: Any) -> dict[str, np.ndarray]:
    with torch.no_grad(), Watch(model, **options) as watch:
        output(model, batch)
    return {record.module: record.heads.max_logit for record in watch.last.records}


# ---- the three that hold until they are undone, on every kind

REMEDIES: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "qk_norm": lambda model, batch: qk_norm(model, batch, gain=1.5),
    "softcap": lambda model, batch: softcap(model, 0.02),
    "rescale": lambda model, batch: rescale(model, "1/d_k"),
    "rescale to a number": lambda model, batch: rescale(model, 0.7),
    "rescale by cosine": lambda model, batch: rescale(model, "cosine"),
    "rescale by log-n": lambda model, batch: rescale(model, "log-n"),
    "rescale per head": lambda model, batch: rescale(model, [0.1, 0.2, 0.3, 0.4]),
}


@pytest.mark.parametrize("name", REMEDIES)
def test_it_acts_is_proved_and_goes_without_a_trace(made: Made, name: str) -> None:
    model, batch = made
    before = state(model)
    with torch.no_grad():
        fast = output(model, batch)
        torch.backends.mha.set_fastpath_enabled(False)
        slow = output(model, batch)
        torch.backends.mha.set_fastpath_enabled(True)
    remedy = REMEDIES[name](model, batch)
    proof = remedy.verify(batch)
    assert proof.modules and set(proof.modules) == set(remedy.modules)
    with torch.no_grad():
        assert not torch.equal(output(model, batch), slow)
    assert "undone" not in repr(remedy)
    remedy.undo()
    remedy.undo()
    assert "undone" in repr(remedy)
    with torch.no_grad():
        assert torch.equal(output(model, batch), fast)
    assert same(state(model), before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_softcap_and_scale_reach_the_softmax(made: Made) -> None:
    model, batch = made
    with softcap(model, 0.01), rescale(model, "none"), Watch(model) as watch:
        output(model, batch)
    assert watch.last.records
    for record in watch.last.records:
        assert record.facts.softcap == 0.01
        assert record.facts.scale == 1.0
        assert np.abs([record.heads.max_logit, record.heads.min_logit]).max() <= 0.01 * (1 + 1e-6)
        assert record.heads.max_logit.max() > 0.005


def test_normalised_heads_have_the_gain_as_their_size(made: Made) -> None:
    model, batch = made
    with qk_norm(model, batch, gain=1.5), Watch(model) as watch:
        output(model, batch)
    assert watch.last.records
    for record in watch.last.records:
        # ε takes a little from heads of small weights
        np.testing.assert_allclose(record.heads.q_rms, 1.5, rtol=1e-3)
        np.testing.assert_allclose(record.heads.k_rms, 1.5, rtol=1e-3)
        assert record.facts.norms_present == ("q_norm", "k_norm")
        assert record.facts.norms_idle == ()


def sabotaged(remedy: Any, name: str, module: nn.Module) -> None:
    """As a change of the model's code would: the remedy's means are there, and not used."""
    if name == "qk_norm":
        for hook in remedy._hooks:
            hook.remove()
        if isinstance(module, lh.torch.MultiHeadAttention):
            plain = type(module).forward

            def forward(*args: Any, **kwargs: Any) -> Tensor:
                norms = module._modules["q_norm"], module._modules["k_norm"]
                module._modules["q_norm"] = module._modules["k_norm"] = nn.Identity()
                try:
                    return plain(module, *args, **kwargs)
                finally:
                    module._modules["q_norm"], module._modules["k_norm"] = norms

            module.forward = forward  # type: ignore[method-assign]
        amend.restore(module, "q_norm", "k_norm")
    elif isinstance(module, lh.torch.MultiHeadAttention):
        module.options |= {"softcap": None, "scale": None}
    else:
        amend.restore(module, "softcap", "rule")


@pytest.mark.parametrize("name", REMEDIES)
def test_the_proof_fails_where_the_remedy_is_gone_around(made: Made, name: str) -> None:
    model, batch = made
    remedy = REMEDIES[name](model, batch)
    remedy.verify(batch)
    where = list(remedy.modules)[-1]
    sabotaged(remedy, name, remedy.modules[where])
    with pytest.raises(NotInForceError) as error:
        remedy.verify(batch)
    assert (where or "(the model)") in str(error.value)
    remedy.undo()


def test_norms_that_exist_and_are_never_called_are_named() -> None:
    """As in a public model whose q_norm and k_norm were made, and never used."""
    model, batch = Plain(), floats()
    remedy = qk_norm(model, batch)

    def forward(x: Tensor) -> Tensor:
        q, k, v = (
            F.linear(x, p.weight, p.bias).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for p in (model.q_proj, model.k_proj, model.v_proj)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return model.out(out.transpose(1, 2).flatten(2))

    model.forward = forward  # type: ignore[method-assign]
    with pytest.raises(NotInForceError, match="q_norm and k_norm never ran"):
        remedy.verify(batch)
    remedy.undo()


def test_norms_whose_result_is_dropped_are_found_by_what_reaches_the_softmax() -> None:
    model, batch = Plain(), floats()
    remedy = qk_norm(model, batch)
    remedy._hooks[0].remove()
    model.q_proj.register_forward_hook(lambda m, a, out: (model.q_norm(out.unflatten(-1, (4, 8))), out)[1])
    with pytest.raises(NotInForceError, match="rows of q reach the softmax"):
        remedy.verify(batch)
    remedy.undo()


def test_a_call_that_was_bound_earlier_is_reached() -> None:
    bound = torch._C._nn.scaled_dot_product_attention
    model, batch = Plain(), floats()
    remedy = softcap(model, 1.0)

    def forward(x: Tensor) -> Tensor:
        q = model.q_proj(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return bound(q, q, q)

    model.forward = forward  # type: ignore[method-assign]
    before = model(batch[0] if isinstance(batch, tuple) else batch)
    remedy.verify(batch)
    assert bound is not torch._C._nn.scaled_dot_product_attention
    remedy.undo()
    assert bound is torch._C._nn.scaled_dot_product_attention
    assert torch.equal(model(batch[0] if isinstance(batch, tuple) else batch), before)


# ---- gains are parameters, gradients flow


def test_gains_are_trained_saved_and_copied(made: Made) -> None:
    model, batch = made
    remedy = qk_norm(model, batch)
    gains = [name for name in model.state_dict() if name.endswith(("q_norm.weight", "k_norm.weight"))]
    assert len(gains) == 2 * len(remedy.modules)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(output(twin, batch), output(model, batch))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    output(model, batch).pow(3).sum().backward()
    optimiser.step()
    for name in gains:
        assert not torch.equal(model.get_parameter(name), torch.ones(WIDTH // HEADS))
        assert torch.equal(twin.get_parameter(name), torch.ones(WIDTH // HEADS))
    assert remedy.verify(batch).modules
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(output(twin, batch), output(model, batch))
    remedy.undo()


@pytest.mark.parametrize("kind", ["plain", "grouped", "fused per head", "nn.MultiheadAttention"])
@pytest.mark.parametrize("name", ["qk_norm", "softcap", "rescale by cosine"])
def test_gradients_are_those_of_finite_differences(kind: str, name: str) -> None:
    torch.manual_seed(0)
    model, batch = KINDS[kind]()
    model, batch = model.double().train(), batch.double()[:1, :4]
    made: dict[str, Callable[[], Any]] = {
        "qk_norm": lambda: qk_norm(model, batch),
        "softcap": lambda: softcap(model, 0.3),
        "rescale by cosine": lambda: rescale(model, "cosine"),
    }
    with made[name]():
        names = [n for n, _ in model.named_parameters() if "norm" in n or n.endswith("bias")]
        parameters = [model.get_parameter(n).detach().clone().requires_grad_() for n in names]

        def function(x: Tensor, *values: Tensor) -> Tensor:
            chosen = dict(zip(names, values, strict=True))
            return torch.func.functional_call(model, chosen, (x,))

        assert parameters
        inputs = (batch.clone().requires_grad_(), *parameters)
        assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_gains_have_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, batch = hugging_face("llama", "sdpa").to(dtype), ids()
    with qk_norm(model, batch) as remedy:
        module = next(iter(remedy.modules.values()))
        assert module.get_parameter("q_norm.weight").dtype is dtype
        remedy.verify(batch)
    with softcap(model, 0.01) as remedy:
        remedy.verify(batch)


# ---- together with others


@pytest.mark.parametrize("kind", ["plain", "llama eager", "gpt2 sdpa", "nn.MultiheadAttention"])
def test_the_order_of_watching_and_remedies_does_not_matter(kind: str) -> None:
    model, batch = KINDS[kind]()
    model.eval()
    seen = []
    watch = Watch(model)
    remedy = softcap(model, 0.01)
    output(model, batch)
    seen.append(watch.last)
    remedy.undo()
    output(model, batch)
    plain = watch.last
    watch.detach()
    remedy = softcap(model, 0.01)
    watch = Watch(model)
    output(model, batch)
    seen.append(watch.last)
    watch.detach()
    remedy.undo()
    for one, other, without in zip(seen[0].records, seen[1].records, plain.records, strict=True):
        assert one.facts.softcap == other.facts.softcap == 0.01
        assert without.facts.softcap is None
        np.testing.assert_array_equal(one.tally, other.tally)


def test_other_models_are_left_alone() -> None:
    torch.manual_seed(0)
    model, other, batch = Plain(), Plain(), floats()
    want = other(batch)
    with softcap(model, 0.01), Watch(other) as watch:
        assert torch.equal(other(batch), want)
    assert watch.last.records[0].facts.softcap is None


def test_copies_carry_a_softcap_while_it_holds() -> None:
    model, batch = Plain(), floats()
    plain = model(batch)
    with softcap(model, 0.01):
        twin = copy.deepcopy(model)
        assert torch.equal(twin(batch), model(batch))
        assert not torch.equal(twin(batch), plain)


def test_levelhead_already_in_use_is_no_way_around() -> None:
    model, batch = hugging_face("llama", "sdpa"), ids()
    with lh.torch.huggingface.use(model), softcap(model, 0.01) as remedy:
        remedy.verify(batch)
    with lh.torch.patch(), softcap(plain := Plain(), 0.01) as remedy:
        remedy.verify(floats())
        assert plain is remedy.model


@pytest.mark.parametrize(
    ("kind", "name"), [*(("plain", name) for name in REMEDIES), ("llama sdpa", "qk_norm"), ("gpt2 eager", "softcap")]
)
def test_compiled_whole_it_is_the_same(kind: str, name: str) -> None:
    torch.manual_seed(0)
    model, batch = KINDS[kind]()
    model.eval()
    remedy = REMEDIES[name](model, batch)
    want = output(model, batch)
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(output(compiled, batch), want)
    remedy.undo()


def test_torchs_own_module_breaks_the_graph_rather_than_the_remedy() -> None:
    model, batch = encoder(), floats()
    with softcap(model, 0.01):
        want = model(batch)
        torch._dynamo.reset()
        compiled: Any = torch.compile(model, backend="aot_eager")
        torch.testing.assert_close(compiled(batch), want)


def test_padded_batches_of_an_encoder_stay_dense() -> None:
    model, batch = encoder(), floats()
    padding = torch.zeros(2, TOKENS, dtype=torch.bool)
    padding[1, 6:] = True
    with softcap(model, 0.01) as remedy, torch.no_grad():
        found = model(batch, src_key_padding_mask=padding)
        remedy.verify({"src": batch, "src_key_padding_mask": padding})
    assert found.shape == batch.shape


# ---- QK-clip


def grown(model: nn.Module, times: float = 3.0) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(times)


CLIPPED: dict[str, Callable[[], Made]] = {
    **{k: v for k, v in KINDS.items() if k not in ("nn.TransformerEncoder",) and " " not in k},
    **{f"fused {layout}": lambda lay=layout: (Fused(layout=lay), floats()) for layout in FUSED},
    **{
        f"{name} {implementation}": lambda n=name, i=implementation: (hugging_face(n, i, layers=1), ids())
        for name, implementation in HUGGING_FACE
    },
    "by hand": lambda: (ByHand(), floats()),
    "without biases": lambda: (Plain(bias=False), floats()),
    "nn.MultiheadAttention, own sizes": lambda: (_Crossing(), floats()),
}


class _Crossing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, kdim=16, vdim=24, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, x[..., :16], x[..., :24], need_weights=False)[0]


@pytest.mark.parametrize("kind", CLIPPED)
def test_clipped_heads_land_at_tau_and_others_keep_their_bits(kind: str) -> None:
    torch.manual_seed(0)
    model, batch = CLIPPED[kind]()
    grown(model.eval())
    deep = kind == "by hand"
    ((name, before),) = maxima(model, batch, deep=deep).items()
    tau = float(np.sort(before)[1:3].mean())  # two heads above, two below
    assert tau > 0
    weights = state(model)
    with QKClip(model, tau) as clip:
        output(model, batch)
        found = clip.step()
        assert len(clip.step()) == 0  # nothing new was seen
        clip.verify(batch)
    over = [head for head in range(HEADS) if before[head] > tau]
    assert sorted(found.heads) == [(name, head) for head in over]
    assert len(over) == 2 and not found.inexact
    for head in over:
        assert found.heads[name, head] == pytest.approx(tau / before[head], rel=1e-5)
    after = maxima(model, batch, deep=deep)[name]
    np.testing.assert_allclose(after[over], tau, rtol=1e-4)
    under = [head for head in range(HEADS) if head not in over]
    np.testing.assert_array_equal(after[under], before[under])
    changed = {n for n, x in model.state_dict().items() if not torch.equal(x, weights[n])}
    assert changed and all(any(word in n for word in ("q", "k", "c_attn", "in_proj")) for n in changed)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("layout", FUSED)
def test_only_the_rows_of_that_head_change(layout: str) -> None:
    torch.manual_seed(0)
    model, batch = Fused(layout), floats()
    grown(model)
    ((_, before),) = maxima(model, batch).items()
    top = int(before.argmax())
    tau = float(np.sort(before)[-2:].mean())
    weight, bias = model.qkv.weight.detach().clone(), model.qkv.bias.detach().clone()
    with QKClip(model, tau) as clip:
        model(batch)
        assert list(clip().heads) == [("", top)]
    rows = model.columns()[:2, top].flatten()
    factor = math.sqrt(tau / before[top])
    expected = weight.clone()
    expected[rows] = (weight[rows].double() * factor).float()
    torch.testing.assert_close(model.qkv.weight.detach(), expected, rtol=1e-6, atol=0)
    kept = torch.ones(3 * WIDTH, dtype=torch.bool)
    kept[rows] = False
    assert torch.equal(model.qkv.weight[kept], weight[kept])
    assert torch.equal(model.qkv.bias[kept], bias[kept])
    assert not torch.equal(model.qkv.bias[rows], bias[rows])


@pytest.mark.parametrize("kind", ["grouped", "levelhead", "llama sdpa", "llama eager"])
def test_shared_keys_are_left_to_the_heads_that_share_them(kind: str) -> None:
    torch.manual_seed(0)
    model, batch = CLIPPED[kind]()
    grown(model.eval())
    tau = float(np.concatenate(list(maxima(model, batch).values())).min()) / 2
    before = state(model)
    with QKClip(model, tau) as clip:
        output(model, batch)
        assert len(clip.step()) == HEADS
    changed = {n for n, x in model.state_dict().items() if not torch.equal(x, before[n])}
    assert changed and all("q_proj" in name for name in changed)


def test_weights_that_modules_share_are_clipped_once() -> None:
    torch.manual_seed(0)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Plain(), Plain()
            self.b.q_proj.weight, self.b.q_proj.bias = self.a.q_proj.weight, self.a.q_proj.bias
            self.b.k_proj.weight, self.b.k_proj.bias = self.a.k_proj.weight, self.a.k_proj.bias

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x)

    model, batch = Two(), floats()
    grown(model)
    before = maxima(model, batch)
    np.testing.assert_array_equal(before["a"], before["b"])
    tau = float(before["a"].min()) / 2
    with QKClip(model, tau) as clip:
        model(batch)
        assert len(clip.step()) == 2 * HEADS
    for found in maxima(model, batch).values():
        np.testing.assert_allclose(found, tau, rtol=1e-4)


def test_training_keeps_below_tau_with_the_optimiser_left_alone() -> None:
    torch.manual_seed(0)
    model, batch, tau = Plain(), floats(), 2.0
    grown(model, 4.0)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    with Watch(model) as watch:
        clip = QKClip(watch, tau)
        counts = []
        for _ in range(3):
            model(batch).square().mean().backward()
            optimiser.step()
            kept = copy.deepcopy(optimiser.state_dict())
            counts.append(len(clip()))  # a plain callable, as hooks of training loops want it
            watch.step()
            assert str(optimiser.state_dict()) == str(kept)
        assert counts[0] == HEADS
        assert len(watch.run().snapshots) == 3
        assert watch.last.records[0].heads.max_logit.max() < 1.1 * tau
        clip.undo()
        assert watch.attached


def test_micro_batches_count_together() -> None:
    torch.manual_seed(0)
    model, batch = Plain(), floats()
    grown(model)
    high = maxima(model, batch)[""]
    with QKClip(model, float(high.min()) / 2) as clip:
        model(batch)
        model(batch * 1e-3)  # the last one alone would clip nothing
        assert len(clip.step()) == HEADS


def test_a_softcap_is_seen_through_and_a_bias_is_confessed() -> None:
    torch.manual_seed(0)
    model, batch = lh.torch.MultiHeadAttention(WIDTH, HEADS, softcap=50.0), floats()
    grown(model, 4.0)
    before = maxima(model, batch)[""]
    tau = float(before.min()) / 2
    with QKClip(model, tau) as clip:
        model(batch)
        clip.step()
    np.testing.assert_allclose(maxima(model, batch)[""], tau, rtol=1e-4)
    bias = torch.randn(TOKENS, TOKENS, generator=torch.Generator().manual_seed(2))
    with QKClip(model, tau / 4) as clip:
        model(batch, mask=bias)
        assert list(clip.step().inexact) == [""]


def test_compiled_models_are_clipped_once_they_were_seen_uncompiled() -> None:
    torch.manual_seed(0)
    model, batch = Plain(), floats()
    grown(model)
    tau = float(maxima(model, batch)[""].min()) / 2
    torch._dynamo.reset()
    with QKClip(model, tau) as clip:
        compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
        compiled(batch)
        with pytest.raises(lh.LevelheadError, match="batch="):
            clip.step()
    torch._dynamo.reset()
    with QKClip(model, tau, batch=batch) as clip:
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        compiled(batch)
        assert len(clip.step()) == HEADS
    np.testing.assert_allclose(maxima(model, batch)[""], tau, rtol=1e-4)


# ---- refusals


def test_a_model_that_does_not_attend() -> None:
    model, batch = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()), floats()
    tries: list[Callable[[], Any]] = [
        lambda: qk_norm(model, batch),
        lambda: softcap(model, 1.0),
        lambda: rescale(model, "none"),
        lambda: QKClip(model),
    ]
    for attempt in tries:
        with pytest.raises(lh.LevelheadError, match="expected modules that attend, got none"):
            attempt()


@pytest.mark.parametrize("bad", [0, -1.0, math.nan, math.inf, "1", True, None])
def test_numbers_that_are_none(bad: Any) -> None:
    model, batch = Plain(), floats()
    for name, attempt in (
        ("cap", lambda: softcap(model, bad)),
        ("tau", lambda: QKClip(model, bad)),
        ("gain", lambda: qk_norm(model, batch, gain=bad)),
        ("eps", lambda: qk_norm(model, batch, eps=bad)),
    ):
        with pytest.raises(lh.LevelheadError, match=f"{name}: expected"):
            attempt()
    assert model.state_dict().keys() == Plain().state_dict().keys()


@pytest.mark.parametrize("bad", ["1/d", {}, math.nan, "sqrt(d_k)"])
def test_rules_that_are_none(bad: Any) -> None:
    with pytest.raises(lh.LevelheadError, match="scale: expected"):
        rescale(Plain(), bad)


@pytest.mark.parametrize("attempt", [lambda m: softcap(m, 1.0), QKClip, lambda m: qk_norm(m, 0)])
def test_no_model(attempt: Callable[[Any], Any]) -> None:
    with pytest.raises(lh.LevelheadError, match="model: expected a torch.nn.Module, got str"):
        attempt("minilm")


def test_a_softmax_by_hand_is_out_of_reach_of_the_call() -> None:
    with pytest.raises(lh.LevelheadError, match="attention: _ByHandAttention forms its softmax"):
        softcap(ByHand(), 1.0)
    with qk_norm(model := ByHand(), floats()) as remedy:  # but not of the projections
        remedy.verify(floats())
        assert model is remedy.model


def test_what_is_normalised_is_neither_normalised_again_nor_clipped() -> None:
    model, batch = hugging_face("qwen3", "sdpa"), ids()
    with pytest.raises(lh.LevelheadError, match="layers.0.self_attn: has a q_norm already"):
        qk_norm(model, batch)
    with QKClip(model) as clip:
        output(model, batch)
        with pytest.raises(lh.LevelheadError, match="renormalised away"):
            clip.step()
    plain = Plain()
    with qk_norm(plain, floats()):
        with pytest.raises(lh.LevelheadError, match="has a q_norm already"):
            qk_norm(plain, floats())
        with pytest.raises(lh.LevelheadError, match="renormalised away"):
            QKClip(plain, batch=floats())


class _Functional(Plain):
    """Normalises where no module shows it."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = F.normalize(q, dim=-1) * 20, F.normalize(k, dim=-1)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_rows_that_cannot_be_told_are_not_guessed() -> None:
    torch.manual_seed(0)
    model, batch = _Functional(), floats()
    before = state(model)
    with QKClip(model, 0.1) as clip:
        model(batch)
        with pytest.raises(lh.LevelheadError, match="no projection's output is q"):
            clip.step()
    with pytest.raises(lh.LevelheadError, match="no projection's output is q"):
        qk_norm(model, batch)
    assert same(state(model), before)


def test_weights_that_do_not_keep_what_is_written_are_refused() -> None:
    torch.manual_seed(0)
    model, batch = Plain(), floats()
    nn.utils.parametrizations.weight_norm(model.q_proj)
    with QKClip(model, 1e-3) as clip:
        model(batch)
        assert len(clip.step()) == HEADS  # the rows of k take the whole factor
    np.testing.assert_allclose(maxima(model, batch)[""], 1e-3, rtol=1e-4)
    nn.utils.parametrizations.weight_norm(model.k_proj)
    with QKClip(model, 1e-4) as clip:
        model(batch)
        with pytest.raises(lh.LevelheadError, match="plain weights|rows that belong"):
            clip.step()


def test_logits_that_are_lost() -> None:
    model, batch = Plain(), floats()
    with torch.no_grad():
        model.q_proj.weight[0, 0] = math.nan
    with QKClip(model) as clip:
        model(batch)
        with pytest.raises(lh.LevelheadError, match="NaN or infinite"):
            clip.step()


def test_steps_without_a_forward_pass_and_sampled_watches() -> None:
    model = Plain()
    with QKClip(model) as clip, pytest.raises(lh.LevelheadError, match="none yet"):
        clip.step()
    with Watch(model, rows=2) as watch, pytest.raises(lh.LevelheadError, match="rows=None"):
        QKClip(watch)


def test_weights_cannot_be_had_from_a_remedied_call() -> None:
    attention, x = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), floats()
    with softcap(attention, 1.0), pytest.raises(lh.LevelheadError, match="need_weights=False"):
        attention(x, x, x)
    attention(x, x, x)


def test_the_same_remedy_twice() -> None:
    model = Plain()
    with softcap(model, 1.0), pytest.raises(lh.LevelheadError, match="undo"):
        softcap(model, 2.0)


def test_what_no_state_dict_has_is_saved_with_the_run_and_said(tmp_path: Path) -> None:
    for model in (Plain(), lh.torch.MultiHeadAttention(WIDTH, HEADS)):
        with softcap(model, 0.01) as remedy, rescale(model, "none"):
            assert "a state_dict does not have it" in str(remedy.verify(floats()))
            twin = copy.deepcopy(model)
            for one in (model, twin):
                with Watch(one) as watch:
                    one(floats())
                watch.save(tmp_path / "run.json")
                notes = lh.sinks.read(tmp_path / "run.json").notes
                assert [note.split(":")[0] for note in notes] == [
                    "softcap 0.01 is in force in 1 modules",
                    "rescale none is in force in 1 modules",
                ]
        with Watch(model) as watch:
            model(floats())
        assert watch.run().notes == () and not any("levelhead" in name for name in vars(model))
