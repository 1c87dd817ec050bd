"""transformers' attention interface: FlashAttention with packing, padding and windows, and functions that somebody
registered. The truth is what the (stand-in) kernel was really given."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers import modeling_flash_attention_utils as utils

import kernel_stubs as stubs
import levelhead as lh
from kernel_stubs import positional
from watched import one_thread
from watched_truth import agrees, truth

__all__ = ["one_thread"]  # a fixture

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 40}


class Caught:
    """The arguments of every call of the stand-in kernels, as one dense call each."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor, Tensor, dict[str, Any]]] = []

    def whole(self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: Any = None,
              causal: bool = False, window_size: Any = (-1, -1), softcap: float = 0.0) -> Tensor:  # fmt: skip
        bias = positional(q.shape[1], k.shape[1], causal, window_size)[None]
        options = {"scale": softmax_scale, "softcap": softcap or None}
        self.calls.append((q.transpose(1, 2), k.transpose(1, 2), bias, options))
        return stubs.attend(q, k, v, softmax_scale, bias, softcap)

    def varlen(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
               max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False,
               window_size: Any = (-1, -1), softcap: float = 0.0) -> Tensor:  # fmt: skip
        bias = torch.full((1, 1, len(q), len(k)), -math.inf)
        bounds = zip(cu_seqlens_q[:-1], cu_seqlens_q[1:], cu_seqlens_k[:-1], cu_seqlens_k[1:], strict=True)
        for a, b, c, d in bounds:
            bias[0, 0, a:b, c:d] = positional(int(b - a), int(d - c), causal, window_size)[0]
        options = {"scale": softmax_scale, "softcap": softcap or None}
        self.calls.append((q.transpose(0, 1)[None], k.transpose(0, 1)[None], bias, options))
        return stubs.attend(q[None], k[None], v[None], softmax_scale, bias, softcap)[0]


@pytest.fixture
def caught(monkeypatch: pytest.MonkeyPatch) -> Caught:
    kernels = Caught()
    functions = (kernels.whole, kernels.varlen, None, utils._pad_input, utils._unpad_input)
    for name in ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn", "_pad_fn"):
        monkeypatch.setattr(utils, name, None)
    for name in ("_unpad_fn", "_process_flash_kwargs_fn", "_process_with_kvcache_kwargs_fn"):
        monkeypatch.setattr(utils, name, None)
    monkeypatch.setattr(utils, "_lazy_imports", lambda *args, **kwargs: functions)
    return kernels


def llama(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=None, **options)
    return _flash(transformers.MistralModel(config))


def _flash(model: Any) -> nn.Module:
    model.config._attn_implementation = "flash_attention_2"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0 if parameter.dim() > 1 else 1.0)
    return model.eval()


TOKENS = torch.arange(1, 13)
LEFT = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
INPUTS: dict[str, dict[str, Any]] = {
    "plain": {"input_ids": TOKENS.view(2, 6)},
    "left padding": {"input_ids": TOKENS.view(2, 6), "attention_mask": LEFT},
    "right padding": {"input_ids": TOKENS.view(2, 6), "attention_mask": LEFT.flip(1)},
    "positions that begin again": {
        "input_ids": TOKENS[None],
        "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 4, 5]]),
    },
    "cumulative lengths": {
        "input_ids": TOKENS[None],
        "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 4, 5]]),
        "cu_seq_lens_q": torch.tensor([0, 4, 6, 12], dtype=torch.int32),
        "cu_seq_lens_k": torch.tensor([0, 4, 6, 12], dtype=torch.int32),
        "max_length_q": 6,
        "max_length_k": 6,
    },
}


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("name", INPUTS)
def test_flash_attention_through_transformers(caught: Caught, name: str, window: int | None) -> None:
    model = llama()
    for layer in model.layers:
        layer.self_attn.sliding_window = window
        layer.self_attn.config.sliding_window = window
    with torch.no_grad():
        alone = model(**INPUTS[name]).last_hidden_state
        caught.calls.clear()
        with lh.watch(model) as w:
            seen = model(**INPUTS[name]).last_hidden_state
    assert torch.equal(alone, seen)
    ((q, k, bias, options),) = caught.calls
    (record,) = w.last.records
    agrees(record, truth(q, k, bias, **options), places=False)
    assert record.facts.how == "huggingface:flash_attention_2"


def test_windows_of_an_encoder_have_two_sides(caught: Caught) -> None:
    torch.manual_seed(0)
    config = transformers.ModernBertConfig(
        **(SIZES | {"num_hidden_layers": 2}), local_attention=4, global_attn_every_n_layers=2, pad_token_id=0
    )
    model = _flash(transformers.ModernBertModel(config))
    with torch.no_grad(), lh.watch(model) as w:
        model(TOKENS.view(2, 6))
    assert len(caught.calls) == 2
    for record, (q, k, bias, options) in zip(w.last.records, caught.calls, strict=True):
        agrees(record, truth(q, k, bias, **options), places=False)


# ---- functions that somebody registered


@pytest.fixture
def registered() -> Iterator[Any]:
    def put(function: Any) -> nn.Module:
        AttentionInterface.register("mine", function)
        model = transformers.MistralModel(transformers.MistralConfig(**SIZES, num_key_value_heads=2))
        model.config._attn_implementation = "mine"
        return model.eval()

    yield put
    AttentionInterface._global_mapping.pop("mine", None)


def by_hand(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **rest: Any) -> Any:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return ((q @ k.mT * scaling * 0.5).softmax(-1) @ v).transpose(1, 2), None


def calls_sdpa(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **rest: Any) -> Any:
    out = nn.functional.scaled_dot_product_attention(q, k, v, scale=scaling / 2, enable_gqa=True)
    return out.transpose(1, 2), None


def test_a_registered_function_is_named_not_guessed(registered: Any) -> None:
    model = registered(by_hand)
    with torch.no_grad(), lh.watch(model) as w:
        model(TOKENS[None])
    assert [record.facts.how for record in w.last.records] == ["softmax by hand"]
    with torch.no_grad(), lh.watch(model, deep=False) as w:
        model(TOKENS[None])
    assert w.last.records == ()
    (line,) = (line for line in w.coverage() if line.module.endswith("self_attn"))
    assert f"{by_hand.__module__}.by_hand (huggingface:mine) is not described" in line.how
    assert "describe=" in line.how


def test_a_known_function_inside_a_registered_one_is_seen(registered: Any) -> None:
    model = registered(calls_sdpa)
    with torch.no_grad(), lh.watch(model) as w:
        model(TOKENS[None])
    (record,) = w.last.records
    assert record.facts.scale == pytest.approx(8**-0.5 / 2)
    assert [line.note for line in w.coverage()] == [""]


def test_a_registered_function_can_be_taught(registered: Any) -> None:
    model = registered(by_hand)

    def describe(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **rest: Any) -> Any:
        return {"q": q, "k": k, "scale": scaling * 0.5}

    with torch.no_grad(), lh.watch(model, describe={by_hand: describe}) as w:
        model(TOKENS[None])
    (record,) = w.last.records
    assert record.facts.scale == pytest.approx(8**-0.5 / 2)
    assert not record.facts.causal


def test_a_model_that_is_not_served_is_observed_after_another_was() -> None:
    """`use` wraps the functions of all models; only served ones are computed by levelhead."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, attn_implementation="eager")
    served, other = (transformers.LlamaModel(config).eval() for _ in range(2))
    with lh.torch.huggingface.use(served), torch.no_grad(), lh.watch(other) as w:
        other(torch.tensor([[1, 2, 3, 4]]))
    assert [record.facts.how for record in w.run().latest] == ["huggingface:eager"]
