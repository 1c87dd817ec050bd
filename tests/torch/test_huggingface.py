"""Hugging Face models on levelhead: each architecture is compared with its own eager results and gradients, no mask is
lost, and undo restores everything.
"""

from __future__ import annotations

import copy
import doctest
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import levelhead as lh
from huggingface_zoo import specimen
from levelhead.torch.huggingface import serving, use
from levelhead.torch.huggingface.survey import understood

TEXT = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
GROUPED = TEXT | dict(num_key_value_heads=2, head_dim=8)
MIXED = ["sliding_attention", "full_attention"]
WINDOW = 6  # shorter than every sequence here
IMAGE = dict(image_size=16, patch_size=4, num_channels=3)


def t5() -> nn.Module:
    sizes = dict(vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    return transformers.T5Model(transformers.T5Config(pad_token_id=0, dropout_rate=0.0, **sizes))


def whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=97,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=30,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    return transformers.WhisperModel(config)


def text(kind: str, **options: Any) -> Callable[[], nn.Module]:
    base = TEXT if kind in ("Bert", "Falcon", "GPT2") else GROUPED

    def make() -> nn.Module:
        config = getattr(transformers, f"{kind}Config")(**base, **options)
        model: nn.Module = getattr(transformers, f"{kind}Model")(config)
        return model

    return make


def vit() -> nn.Module:
    sizes = {name: TEXT[name] for name in ("hidden_size", "intermediate_size")}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.ViTModel(transformers.ViTConfig(**IMAGE, **sizes, **layers))


# Whether the architecture itself supports sdpa, and how many modules attend.
MODELS: dict[str, tuple[Callable[[], nn.Module], bool, int]] = {
    "llama": (text("Llama"), True, 2),
    "qwen3": (
        text("Qwen3", layer_types=MIXED, sliding_window=WINDOW, use_sliding_window=True, max_window_layers=1),
        True,
        2,
    ),
    "gemma2": (
        text("Gemma2", layer_types=MIXED, sliding_window=WINDOW, query_pre_attn_scalar=8, attn_logit_softcapping=1.5),
        False,
        2,
    ),
    "gemma3": (text("Gemma3Text", layer_types=MIXED, sliding_window=WINDOW, query_pre_attn_scalar=8), True, 2),
    "gpt-oss": (
        text("GptOss", layer_types=MIXED, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=2),
        False,
        2,
    ),
    "mistral": (text("Mistral", sliding_window=WINDOW), True, 2),
    "bert": (text("Bert", attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0), True, 2),
    "t5": (t5, True, 6),
    "vit": (vit, True, 2),
    "whisper": (whisper, True, 6),
}
CAUSAL = ["llama", "qwen3", "gemma2", "gemma3", "gpt-oss", "mistral"]
CASES = [
    pytest.param(name, implementation, id=f"{name}-{implementation}")
    for name, (_, sdpa, _) in MODELS.items()
    for implementation in (("eager", "sdpa") if sdpa else ("eager",))
]


def made(name: str, implementation: str = "sdpa", dtype: torch.dtype = torch.float32) -> Any:
    """A model whose parameters are large enough that its attention weights differ."""
    torch.manual_seed(0)
    model: Any = MODELS[name][0]()
    with torch.no_grad():
        for key, x in model.named_parameters():
            last = key.split(".")[-2]  # T5 is initialised with large ones
            if x.dim() > 1 and name != "t5" and ("q" in last or "k" in last):
                x.mul_(6.0)
            if key.endswith("sinks"):
                x.normal_()
    model.set_attn_implementation(implementation)
    return model.to(dtype).eval()


def inputs(name: str, *, left: bool = False) -> dict[str, Tensor]:
    """A batch in which one row is shorter, padded on the right or on the left."""
    torch.manual_seed(1)
    tokens, mask = torch.randint(3, 97, (3, 17)), torch.ones(3, 17, dtype=torch.long)
    mask[1, slice(None, 5) if left else slice(-5, None)] = 0
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16)}
    if name == "whisper":
        decoder = {"decoder_input_ids": tokens, "decoder_attention_mask": mask}
        return {"input_features": torch.randn(3, 8, 40), **decoder}
    if name == "t5":
        decoder = {"decoder_input_ids": tokens[:, :11], "decoder_attention_mask": mask[:, :11]}
        return {"input_ids": tokens, "attention_mask": mask, **decoder}
    return {"input_ids": tokens, "attention_mask": mask}


def kept(name: str, batch: dict[str, Tensor], out: Tensor) -> Tensor:
    """The rows of real tokens: the row of a padding token is not compared."""
    key = "decoder_attention_mask" if "decoder_attention_mask" in batch else "attention_mask"
    return out[batch[key].bool()] if key in batch else out


def run(model: Any, name: str, batch: dict[str, Tensor]) -> Tensor:
    return kept(name, batch, model(**batch).last_hidden_state)


def learned(model: Any, name: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    out = run(model, name, batch)
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    return {key: x.grad.clone() for key, x in model.named_parameters() if x.grad is not None}


def leftovers(model: nn.Module) -> list[str]:
    """All state that could remain after undo."""
    found = [
        f"{name}.{key}"
        for name, module in model.named_modules()
        for key in module.__dict__
        if "levelhead" in key or key == "forward"
    ]
    if "__getitem__" in vars(AttentionInterface):
        found.append("AttentionInterface.__getitem__")
    if AttentionInterface.get_interface is not GET_INTERFACE:
        found.append("AttentionInterface.get_interface")
    if AttentionInterface()["sdpa"] is not sdpa_attention_forward:
        found.append("sdpa")
    return found


GET_INTERFACE = AttentionInterface.get_interface


@pytest.fixture(autouse=True)
def nothing_stays() -> Any:
    yield
    assert leftovers(nn.Module()) == []


# ---- the same numbers


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_as_eager(name: str, implementation: str, left: bool) -> None:
    batch = inputs(name, left=left)
    model, eager = made(name, implementation), made(name, "eager")
    with torch.no_grad():
        wanted, before = run(eager, name, batch), run(model, name, batch)
        with use(model) as used:
            found = run(model, name, batch)
        after = run(model, name, batch)
    assert len(used.served) == used.calls == MODELS[name][2]
    assert used.left == {}
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
    assert not torch.equal(found, before)  # levelhead's own rounding
    assert torch.equal(after, before)
    assert leftovers(model) == []
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_gradients_as_eager(name: str, implementation: str) -> None:
    batch = inputs(name)
    model, eager = made(name, implementation), made(name, "eager")
    wanted = learned(eager, name, batch)
    with use(model) as used:
        found = learned(model, name, batch)
    assert used.calls == MODELS[name][2]
    assert found.keys() == wanted.keys()
    for key, x in wanted.items():
        largest = float(x.abs().max())
        torch.testing.assert_close(found[key], x, atol=1e-4 * max(1.0, largest), rtol=0, msg=key)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_half_types(name: str, implementation: str, dtype: torch.dtype) -> None:
    batch = inputs(name)
    halves = {key: x.to(dtype) if x.is_floating_point() else x for key, x in batch.items()}
    with torch.no_grad():
        wanted = run(made(name, "eager"), name, batch)
        model = made(name, implementation, dtype)
        own = run(model, name, halves).float()
        with use(model) as used:
            found = run(model, name, halves).float()
    assert used.calls == MODELS[name][2]
    # At most as far from the truth as the model itself.
    bar = 1.5 * float((own - wanted).abs().max()) + 1e-3
    assert float((found - wanted).abs().max()) <= bar


def test_autocast() -> None:
    batch = inputs("llama")
    for implementation in ("sdpa", "eager"):
        model = made("llama", implementation)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            own = run(model, "llama", batch)
            with use(model) as used:
                found = run(model, "llama", batch)
        assert used.calls == 2
        torch.testing.assert_close(found.float(), own.float(), atol=0.1, rtol=0)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_dropout_has_its_share(name: str) -> None:
    # Values of ones: the output is the sum of the kept weights over 1 − p, 1 on average.
    for implementation in ("sdpa", "eager"):
        model = made(name, implementation)
        module = next(m for _, m in model.named_modules() if hasattr(m, "scaling"))
        q, ones = torch.randn(1, 4, 64, 8), torch.ones(1, 4, 64, 8)
        eager = transformers.models.bert.modeling_bert.eager_attention_forward
        with use(model):
            call = AttentionInterface().get_interface(implementation, eager)
            torch.manual_seed(0)
            out, _ = call(module.train(), q, q, ones, None, dropout=0.5, scaling=0.1)
            assert out.shape == (1, 64, 4, 8)
            assert not torch.allclose(out, torch.ones_like(out), atol=0.05)
            assert abs(float(out.mean()) - 1) < 0.05
            if implementation == "eager":  # eager functions read attributes of the module
                still, _ = call(module.eval(), q, q, ones, None, dropout=0.5, scaling=0.1)
                assert torch.allclose(still, torch.ones_like(still), atol=1e-5)


# ---- masks are never lost


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("padded", [False, True])
def test_the_past_does_not_see_the_future(name: str, implementation: str, padded: bool) -> None:
    if implementation == "sdpa" and not MODELS[name][1]:
        implementation = "eager"
    model, batch = made(name, implementation), inputs(name)
    if not padded:
        del batch["attention_mask"]
    changed = dict(batch, input_ids=batch["input_ids"].clone())
    changed["input_ids"][:, 9:] = 5
    with torch.no_grad(), use(model):
        a, b = (model(**x).last_hidden_state for x in (batch, changed))
    torch.testing.assert_close(a[:, :9], b[:, :9], atol=1e-6, rtol=0)
    assert not torch.allclose(a[:, 9:], b[:, 9:], atol=1e-3)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_padding_is_not_seen(implementation: str) -> None:
    model, batch = made("bert", implementation), inputs("bert")
    changed = dict(batch, input_ids=batch["input_ids"].clone())
    changed["input_ids"][1, -5:] = 7
    with torch.no_grad(), use(model):
        a, b = (run(model, "bert", x) for x in (batch, changed))
        bare = model(changed["input_ids"]).last_hidden_state[batch["attention_mask"].bool()]
    torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
    assert not torch.allclose(a, bare, atol=1e-3)  # the mask does something


@pytest.mark.parametrize("name", ["mistral", "gemma3", "qwen3"])
def test_windows_end(name: str) -> None:
    # Where every layer has one window, two layers see two windows back and no further.
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "mistral": {},
        "gemma3": {"layer_types": [MIXED[0]] * 2},
        "qwen3": {"layer_types": [MIXED[0]] * 2},
    }[name]
    kind = {"mistral": "Mistral", "gemma3": "Gemma3Text", "qwen3": "Qwen3"}[name]
    if name == "qwen3":
        options |= {"use_sliding_window": True, "max_window_layers": 0}
    model: Any = text(kind, sliding_window=WINDOW, **options)().eval()
    with torch.no_grad():
        for x in model.layers.parameters():
            x.mul_(6.0)  # so that it passes through two layers
    tokens = torch.randint(3, 97, (1, 24))
    changed = tokens.clone()
    changed[:, 0] += 1
    with torch.no_grad(), use(model) as used:
        a, b = (model(x).last_hidden_state for x in (tokens, changed))
    assert used.calls == 4
    far = 2 * (WINDOW - 1)
    assert torch.equal(a[:, far + 1 :], b[:, far + 1 :])
    assert not torch.equal(a[:, far], b[:, far])


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CAUSAL)
def test_a_cache_changes_nothing(name: str, implementation: str) -> None:
    if implementation == "sdpa" and not MODELS[name][1]:
        implementation = "eager"
    model, tokens = made(name, implementation), inputs(name)["input_ids"]
    with torch.no_grad(), use(model):
        whole = model(tokens).last_hidden_state
        cache, parts = None, []
        for piece in (tokens[:, :7], tokens[:, 7:12], tokens[:, 12:13], tokens[:, 13:]):
            out = model(piece, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            parts.append(out.last_hidden_state)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_generates_the_same(implementation: str, cache: str | None) -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED)).eval()
    model.set_attn_implementation(implementation)
    batch = inputs("llama", left=True)
    options: dict[str, Any] = dict(max_new_tokens=12, do_sample=False, cache_implementation=cache)
    if cache is not None:
        options["disable_compile"] = True
    wanted = model.generate(**batch, **options)
    with use(model) as used:
        found = model.generate(**batch, **options)
    assert used.calls == 2 * (found.shape[1] - 17)
    assert torch.equal(found, wanted)


def test_positions_that_start_again_stay_apart() -> None:
    # Packed sequences without a mask: transformers finds them in position_ids.
    model, tokens = made("llama"), inputs("llama")["input_ids"][:1]
    positions = torch.tensor([[*range(8), *range(9)]])
    with torch.no_grad(), use(model):
        packed = model(tokens, position_ids=positions, use_cache=False).last_hidden_state
        alone = model(tokens[:, 8:], use_cache=False).last_hidden_state
    torch.testing.assert_close(packed[:, 8:], alone, atol=1e-5, rtol=0)


def test_a_query_that_sees_nothing_gets_what_the_model_gives_it() -> None:
    # Eager attention with the lowest number everywhere: equal weights. Under sdpa, with a boolean mask: 0.
    model = made("llama", "eager")
    module = model.layers[0].self_attn
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    lowest = torch.finfo(torch.float32).min
    mask = torch.tensor([[0.0, lowest, lowest], [lowest] * 3, [0.5, 0.0, lowest]])[None, None]
    eager = transformers.models.llama.modeling_llama.eager_attention_forward
    with use(model):
        out, _ = AttentionInterface().get_interface("eager", eager)(module, q, k, k, mask, scaling=0.3)
        hidden, _ = AttentionInterface().get_interface("sdpa", eager)(module, q, k, k, mask == 0, scaling=0.3)
    wanted, _ = eager(module, q, k, k, mask, scaling=0.3)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(out[:, 1], k.mean(2).repeat_interleave(2, 1))
    assert bool((hidden[:, 1] == 0).all())


def test_a_query_that_sees_only_its_sink() -> None:
    model = made("gpt-oss", "eager")
    module = model.layers[0].self_attn
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    lowest = torch.finfo(torch.float32).min
    mask = torch.tensor([[0.0, lowest, lowest], [lowest] * 3, [0.5, 0.0, lowest]])[None, None]
    eager = transformers.models.gpt_oss.modeling_gpt_oss.eager_attention_forward
    wanted, _ = eager(module, q, k, k, mask, scaling=0.3, s_aux=module.sinks)
    with use(model):
        call_it = AttentionInterface().get_interface("eager", eager)
        found, weights = call_it(module, q, k, k, mask, scaling=0.3, s_aux=module.sinks)
    torch.testing.assert_close(found, wanted)
    assert bool((found[:, 1] == 0).all()) and bool((weights[:, :, 1] == 0).all())


# ---- torch.compile


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss"])
def test_compiles_whole(name: str) -> None:
    model, batch = made(name, "sdpa" if MODELS[name][1] else "eager"), inputs(name)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        before = kept(name, batch, compiled(**batch).last_hidden_state)
        with use(model):
            wanted = run(model, name, batch)
            found = kept(name, batch, compiled(**batch).last_hidden_state)
        after = kept(name, batch, compiled(**batch).last_hidden_state)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    assert not torch.equal(found, before)  # compiled again, with levelhead
    assert torch.equal(after, before)


def test_compiled_gradients() -> None:
    model, batch = made("llama"), inputs("llama")
    torch.compiler.reset()
    with use(model):
        wanted = learned(model, "llama", batch)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        model.zero_grad()
        out = kept("llama", batch, compiled(**batch).last_hidden_state)
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    for key, x in model.named_parameters():
        torch.testing.assert_close(x.grad, wanted[key], atol=1e-4, rtol=1e-4, msg=key)


def test_checkpointing_gives_the_same_gradients() -> None:
    model, batch = made("llama"), inputs("llama")
    with use(model) as used:
        wanted = learned(model, "llama", batch)
        calls = used.calls
        model.gradient_checkpointing_enable()
        found = learned(model.train(), "llama", batch)
        assert used.calls == calls + 4  # forward twice
    assert all(torch.equal(found[key], x) for key, x in wanted.items())


# ---- whose attention, and for how long


def test_other_models_and_copies_run_as_before() -> None:
    batch = inputs("llama")
    model, other = made("llama"), made("llama")
    with torch.no_grad():
        own = run(other, "llama", batch)
        with use(model) as used:
            duplicate = copy.deepcopy(model)
            assert torch.equal(run(other, "llama", batch), own)
            assert torch.equal(run(duplicate, "llama", batch), own)
            assert used.calls == 0
            assert not torch.equal(run(model, "llama", batch), own)


def test_nested_and_out_of_order() -> None:
    batch = inputs("llama")
    model, other = made("llama"), made("llama", "eager")
    with torch.no_grad():
        own, others = run(model, "llama", batch), run(other, "llama", batch)
        first, second, third = use(model), use(other), use(model)
        served = run(model, "llama", batch)
        assert (first.calls, second.calls, third.calls) == (2, 0, 2)
        first.undo()
        assert torch.equal(run(model, "llama", batch), served)
        assert (first.calls, third.calls) == (2, 4)
        third.undo()
        third.undo()  # again: nothing
        assert torch.equal(run(model, "llama", batch), own)
        assert not torch.equal(run(other, "llama", batch), others)
        second.undo()
        assert torch.equal(run(other, "llama", batch), others)
    assert leftovers(model) == leftovers(other) == []


def test_undone_after_an_error() -> None:
    model, batch = made("llama"), inputs("llama")

    class Stop(Exception):
        pass

    def fails(*args: Any) -> None:
        raise Stop

    model.layers[1].mlp.register_forward_pre_hook(fails)
    with pytest.raises(Stop), use(model) as used:
        run(model, "llama", batch)
    assert used.calls == 2
    assert leftovers(model) == []


def test_somebody_elses_wrapper_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, seen = made("llama"), inputs("llama"), []
    used = use(model)
    ours = AttentionInterface.get_interface

    def theirs(self: Any, *args: Any) -> Any:
        seen.append(args[0])
        return ours(self, *args)

    monkeypatch.setattr(AttentionInterface, "get_interface", theirs)
    used.undo()
    with torch.no_grad():
        run(model, "llama", batch)
    assert seen == ["sdpa", "sdpa"]
    assert AttentionInterface.get_interface is theirs
    monkeypatch.undo()
    AttentionInterface.get_interface = GET_INTERFACE  # type: ignore[method-assign]


def test_threads() -> None:
    batch = inputs("llama")
    model, other = made("llama"), made("llama")
    with torch.no_grad():
        own = run(other, "llama", batch)
    wrong: list[str] = []

    def plain() -> None:
        with torch.no_grad():
            for _ in range(20):
                if not torch.equal(run(other, "llama", batch), own):
                    wrong.append("the other model changed")

    thread = threading.Thread(target=plain)
    thread.start()
    with torch.no_grad():
        for _ in range(20):
            with use(model):
                if torch.equal(run(model, "llama", batch), own):
                    wrong.append("the model was not served")
    thread.join()
    assert wrong == []


def test_example() -> None:
    assert doctest.testmod(serving) == (0, 9)


def test_prints() -> None:
    model = made("llama")
    used = use(model)
    assert repr(used) == "use(LlamaModel): 2 modules served, 0 calls"
    used.undo()
    assert repr(used).endswith(", undone")


# ---- modules that do not ask the interface


@pytest.mark.parametrize("alibi", [False, True])
def test_modules_that_call_torch_themselves(alibi: bool) -> None:
    torch.manual_seed(0)
    make = text("Falcon", alibi=alibi, hidden_dropout=0.0, attention_dropout=0.0)
    model, batch = make().eval(), inputs("llama")
    with torch.no_grad():
        before = run(model, "llama", batch)
        with use(model) as used:
            found = run(model, "llama", batch)
            again = run(copy.deepcopy(model), "llama", batch)
        after = run(model, "llama", batch)
    assert used.calls == len(used.served) == 2
    torch.testing.assert_close(found, before, atol=1e-4, rtol=0)
    assert not torch.equal(found, before)
    assert torch.equal(after, before) and torch.equal(again, before)
    assert leftovers(model) == []


def test_torchs_own_module_is_served() -> None:
    # The head that pools in SigLIP, and with it Gemma 3 and others, asks for weights and drops them.
    torch.manual_seed(0)
    model = nn.ModuleList([made("llama"), nn.MultiheadAttention(8, 2, batch_first=True).eval()])
    q, k = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    hidden = torch.zeros(2, 5, dtype=torch.bool)
    hidden[1, 3:] = True
    for asked in (False, True):
        wanted, wanted_weights = model[1](q, k, k, key_padding_mask=hidden, need_weights=asked)
        with use(model) as used:
            found, weights = model[1](q, k, k, key_padding_mask=hidden, need_weights=asked)
        assert "1" in used.served and used.calls == 1
        torch.testing.assert_close(found, wanted)
        assert not torch.equal(found, wanted)
        assert (weights is None) == (not asked)
        if asked:
            torch.testing.assert_close(weights, wanted_weights)


# ---- what is refused


def test_modules_of_another_formula_are_named() -> None:
    found = specimen("deformable_detr")
    with pytest.raises(lh.LevelheadError, match="DeformableAttention attends to sampled positions"):
        use(found.model)
    with torch.no_grad(), use(found.model, partial=True) as used:
        found.run()
    assert used.calls == len(used.served) >= 2
    assert all("sampled" in why for why in used.left.values()) and len(used.left) >= 4
    assert f"{len(used.left)} left" in repr(used)


def test_not_a_model() -> None:
    with pytest.raises(lh.LevelheadError, match=r"model: expected a torch\.nn\.Module, got str"):
        use("llama")  # type: ignore[arg-type]
    with pytest.raises(lh.LevelheadError, match="modules that attend, got none in Linear"):
        use(nn.Linear(2, 2))


def test_other_implementations() -> None:
    model = made("llama")
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(lh.LevelheadError, match="runs 'flex_attention'"):
        use(model)
    model = made("llama")
    with use(model):  # and when it is changed afterwards
        model.config._attn_implementation = "flex_attention"
        with pytest.raises(lh.LevelheadError, match="flex_attention_forward in LlamaAttention"):
            model.layers[0].self_attn(torch.randn(1, 3, 32), position_embeddings=(torch.ones(1, 3, 8),) * 2)


def test_a_function_registered_in_sdpas_place_is_not_overruled() -> None:
    def mine(*args: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(*args, **kwargs)

    model, batch = made("llama"), inputs("llama")
    AttentionInterface.register("sdpa", mine)
    try:
        with use(model), pytest.raises(lh.LevelheadError, match="got mine in LlamaAttention"):
            run(model, "llama", batch)
    finally:
        AttentionInterface.register("sdpa", sdpa_attention_forward)


def call(**options: Any) -> Any:
    """One call of the interface in a module that is served."""
    model = made("llama", "sdpa")
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    arguments: dict[str, Any] = {"attention_mask": None, "query": q, "key": k, "value": k} | options
    name = arguments.pop("name", "sdpa")
    eager = transformers.models.llama.modeling_llama.eager_attention_forward
    with use(model):
        function = AttentionInterface().get_interface(name, eager)
        return function(model.layers[0].self_attn, **arguments)[0]


def test_options_that_the_function_does_not_read_are_ignored() -> None:
    # transformers passes what a model was called with down to its attention function.
    plain = call(query=(q := torch.randn(1, 4, 5, 8)), key=(k := torch.randn(1, 2, 5, 8)), value=k)
    down = {"labels": torch.ones(1), "logits_to_keep": 1, "vision_feature_layer": -2, "decoder_input_ids": q.long()}
    for name in ("sdpa", "eager"):
        mask = {"attention_mask": None if name == "sdpa" else torch.full((5, 5), -torch.inf).triu(1)[None, None]}
        torch.testing.assert_close(call(query=q, key=k, value=k, name=name, **mask, **down, is_causal=True), plain)


def test_an_option_that_the_function_reads_is_known_or_refused() -> None:
    def by_name(module: Any, query: Any, key: Any, value: Any, mask: Any, temperature: Any = None, **more: Any) -> Any:
        weights = torch.softmax(torch.matmul(query, key.transpose(2, 3)), -1)
        return torch.matmul(weights, value), weights

    def inside(module: Any, query: Any, key: Any, value: Any, mask: Any, **more: Any) -> Any:
        weights = torch.softmax(torch.matmul(query, key.transpose(2, 3)) * more["temperature"], -1)
        return torch.matmul(weights, value), weights

    with pytest.raises(lh.LevelheadError, match=r"known options, got \['cache'\]"):
        call(cache=object())
    q = torch.randn(3, 1, 4, 5, 8)
    for function in (by_name, inside):
        model = made("llama")
        with use(model):
            call_it = AttentionInterface().get_interface("eager", function)
            with pytest.raises(lh.LevelheadError, match=r"known options, got \['temperature'\]"):
                call_it(model.layers[0].self_attn, *q, None, temperature=2.0)


def test_masks_that_cannot_be_meant() -> None:
    with pytest.raises(lh.LevelheadError, match="an additive mask, got bool"):
        call(name="eager", attention_mask=torch.ones(1, 1, 5, 5, dtype=torch.bool))
    with pytest.raises(lh.LevelheadError, match=r"bool or a floating dtype, got torch\.int64"):
        call(attention_mask=torch.ones(1, 1, 5, 5, dtype=torch.long))
    with pytest.raises(lh.LevelheadError, match="attn_mask: expected a shape that broadcasts"):
        call(attention_mask=torch.ones(1, 1, 5, 4, dtype=torch.bool))


def test_other_devices() -> None:
    class Elsewhere(Tensor):
        device = torch.device("cuda:0")  # type: ignore[assignment]

    q = torch.randn(1, 4, 5, 8).as_subclass(Elsewhere)
    with pytest.raises(lh.LevelheadError, match="a tensor on device cpu, got cuda:0"):
        call(query=q)


def test_sinks_that_are_not_passed_on() -> None:
    model = made("gpt-oss", "eager")
    module = model.layers[0].self_attn
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    eager = transformers.models.gpt_oss.modeling_gpt_oss.eager_attention_forward
    with use(model):
        function = AttentionInterface().get_interface("eager", eager)
        with pytest.raises(lh.LevelheadError, match="s_aux: expected the sinks"):
            function(module, q, k, k, None, scaling=0.3)


def test_eager_functions_that_mean_something_else() -> None:
    def gated(module: Any, query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> Any:
        weights = torch.softmax(torch.matmul(query, key.mT), -1)
        return torch.matmul(weights, value) * torch.sigmoid(query), None

    def linear(module: Any, query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> Any:
        return torch.matmul(torch.softmax(query, -1), torch.matmul(key.softmax(-2).mT, value)), None

    assert not understood(gated)
    assert not understood(SimpleNamespace())  # type: ignore[arg-type]
    model, q = made("llama"), torch.randn(3, 1, 4, 5, 8)
    with use(model) as used:  # the attention inside is served, what is around it stays
        module = model.layers[0].self_attn
        found, _ = AttentionInterface().get_interface("eager", gated)(module, *q)
        assert used.calls == 1
        with pytest.raises(lh.LevelheadError, match="LlamaAttention computing this call by another formula"):
            AttentionInterface().get_interface("eager", linear)(module, *q)
    torch.testing.assert_close(found, gated(module, *q)[0])
    assert not torch.equal(found, gated(module, *q)[0])


def test_older_modules_ask_by_name() -> None:
    # sdpa by subscript, as transformers 4 does and some modules still do.
    model = made("llama")
    q = torch.randn(1, 4, 5, 8)
    with use(model) as used:
        AttentionInterface()["sdpa"](model.layers[0].self_attn, q, q, q, None)
        assert used.calls == 1
        AttentionInterface()["sdpa"](nn.Identity(), q, q, q, None)
        assert used.calls == 1
