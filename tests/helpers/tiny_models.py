"""Hugging Face models small enough for tests, freshly initialised, with inputs that run them.

Built from configurations alone: nothing is downloaded. Also run by the script for transformers 4,
so only what both versions have is used at import.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

WIDTH, HEADS, GROUPS, LAYERS, TOKENS = 32, 4, 2, 2, 12


@dataclass(frozen=True)
class Tiny:
    """A model: its class and configuration, and the names of what attends in it."""

    kind: str
    config: Callable[[], Any]
    inputs: Callable[[], dict[str, Any]]
    attention: tuple[str, ...]  # patterns with {} for the layer
    implementations: tuple[str, ...] = ("eager", "sdpa", "flex_attention")

    @property
    def modules(self) -> list[str]:
        return [name.format(n) for name in self.attention for n in range(LAYERS)]

    def make(self, implementation: str) -> nn.Module:
        torch.manual_seed(0)
        kind = getattr(transformers, self.kind)
        return kind._from_config(self.config(), attn_implementation=implementation).eval()


_DECODER = dict(
    vocab_size=64,
    hidden_size=WIDTH,
    num_attention_heads=HEADS,
    num_key_value_heads=GROUPS,
    intermediate_size=WIDTH,
    num_hidden_layers=LAYERS,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
_ENCODER = dict(hidden_size=WIDTH, num_attention_heads=HEADS, intermediate_size=WIDTH, num_hidden_layers=LAYERS)


def _config(name: str, base: dict[str, Any], **more: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, name)(**(base | more))


def tokens(seed: int = 3) -> dict[str, Any]:
    ids = torch.randint(3, 64, (2, TOKENS), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids}


def padded() -> dict[str, Any]:
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[1, -4:] = 0
    return tokens() | {"attention_mask": mask}


def _pairs() -> dict[str, Any]:
    ids = tokens()["input_ids"][:1]  # flex_attention takes a position bias for one example only
    return {"input_ids": ids, "decoder_input_ids": ids[:, :7]}


def _image() -> dict[str, Any]:
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    return {"pixel_values": pixels}


def _sound() -> dict[str, Any]:
    heard = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(3))
    return {"input_features": heard, "decoder_input_ids": tokens()["input_ids"][:, :7]}


_GEMMA = dict(head_dim=8, query_pre_attn_scalar=8)
_T5 = dict(
    vocab_size=64, d_model=WIDTH, d_kv=8, d_ff=WIDTH, num_layers=LAYERS, num_heads=HEADS, decoder_start_token_id=0
)
_WHISPER = dict(
    vocab_size=64,
    num_mel_bins=8,
    encoder_layers=LAYERS,
    decoder_layers=LAYERS,
    d_model=WIDTH,
    encoder_attention_heads=HEADS,
    decoder_attention_heads=HEADS,
    encoder_ffn_dim=WIDTH,
    decoder_ffn_dim=WIDTH,
    max_source_positions=20,
    max_target_positions=16,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
    suppress_tokens=None,
    begin_suppress_tokens=None,
)
_GPT2 = dict(vocab_size=64, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=32)
_GPT2 |= dict(bos_token_id=1, eos_token_id=2)
_SELF = ("model.layers.{}.self_attn",)
_NO_SDPA = ("eager", "flex_attention")

MODELS: dict[str, Tiny] = {
    "Llama": Tiny("LlamaForCausalLM", _config("LlamaConfig", _DECODER), padded, _SELF),
    "Mistral": Tiny("MistralForCausalLM", _config("MistralConfig", _DECODER), padded, _SELF),
    "Qwen3": Tiny("Qwen3ForCausalLM", _config("Qwen3Config", _DECODER, head_dim=8), padded, _SELF),
    "Gemma-2": Tiny("Gemma2ForCausalLM", _config("Gemma2Config", _DECODER, **_GEMMA), padded, _SELF, _NO_SDPA),
    "Gemma-3": Tiny("Gemma3ForCausalLM", _config("Gemma3TextConfig", _DECODER, **_GEMMA), padded, _SELF),
    "GPT-OSS": Tiny(
        "GptOssForCausalLM",
        _config("GptOssConfig", _DECODER, head_dim=8, num_local_experts=2, num_experts_per_tok=1),
        padded,
        _SELF,
        ("eager",),  # it takes neither sdpa nor, on a CPU, flex_attention
    ),
    "BERT": Tiny(
        "BertModel", _config("BertConfig", _ENCODER, vocab_size=64), padded, ("encoder.layer.{}.attention.self",)
    ),
    "GPT-2": Tiny(
        "GPT2LMHeadModel", _config("GPT2Config", _GPT2), padded, ("transformer.h.{}.attn",), ("eager", "sdpa")
    ),
    "T5": Tiny(
        "T5ForConditionalGeneration",
        _config("T5Config", _T5),
        _pairs,
        (
            "encoder.block.{}.layer.0.SelfAttention",
            "decoder.block.{}.layer.0.SelfAttention",
            "decoder.block.{}.layer.1.EncDecAttention",
        ),
    ),
    "ViT": Tiny(
        "ViTModel", _config("ViTConfig", _ENCODER, image_size=16, patch_size=8), _image, ("layers.{}.attention",)
    ),
    "Whisper": Tiny(
        "WhisperForConditionalGeneration",
        _config("WhisperConfig", _WHISPER),
        _sound,
        (
            "model.encoder.layers.{}.self_attn",
            "model.decoder.layers.{}.self_attn",
            "model.decoder.layers.{}.encoder_attn",
        ),
    ),
}

LATENT = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}  # widths of MLA's parts


def deepseek(grown: float = 1.0, **options: Any) -> nn.Module:
    """A layer of DeepSeek-V3 (MLA), its weights so many times as large."""
    sizes = {"vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": WIDTH, "moe_intermediate_size": 16}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    sizes |= {"q_lora_rank": 24, "kv_lora_rank": 20, "first_k_dense_replace": 1, **LATENT}
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(**sizes | options)
    model = transformers.DeepseekV3ForCausalLM._from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(grown)
    return model.eval()
