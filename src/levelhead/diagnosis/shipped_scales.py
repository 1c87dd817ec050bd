"""Architectures that use another scale than 1/√d_k on purpose, by their Hugging Face `model_type`.

From the modelling sources of transformers 5.22. Only deliberate factors of the logits are here; other places of the
same 1/√d_k (before the product, half on each side) need no entry. An architecture that is not listed gets no exception.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shipped:
    """The scale of an architecture; a rule of None: its configuration sets it."""

    rule: str | None
    why: str


_T5 = Shipped("none", "T5 models fold the scale into the initialisation of the q projection")
_WITHOUT = Shipped("none", "this family was trained without a scale")
_NORMED = Shipped("none", "this family leaves the size of q and k to its QK-norm")
_GEMMA = Shipped(None, "this family divides by √query_pre_attn_scalar of its configuration")
_GRANITE = Shipped(None, "this family multiplies by attention_multiplier of its configuration")
_KEYS = Shipped(None, "this family multiplies keys by key_multiplier of its configuration")
_YARN = Shipped(None, "with YaRN this family multiplies 1/√d_k by mscale squared")
_TEMPERATURE = Shipped(None, "this family adds a temperature that grows with the position")
_WIDTH = Shipped("1/sqrt(d)", "this architecture was trained with 1/√d of the whole width")
_PAIRS = Shipped(None, "its heads read two streams side by side and it divides by √(d_k/2)")
_DISENTANGLED = Shipped(None, "its logit sums up to three terms, hence 1/√(3 d_k)")
_COSINE = Shipped(None, "its logits are cosines times a learned temperature")
_INKLING = Shipped("1/d_k", "this family scales by 1/d_k, behind a QK-norm")

_FAMILIES: tuple[tuple[Shipped, str], ...] = (
    (_T5, "t5 mt5 umt5 longt5 switch_transformers udop pop2piano"),
    (_T5, "pix2struct pix2struct_text_model pix2struct_vision_model"),
    (_WITHOUT, "gpt_neo dia dia_encoder dia_decoder"),
    (_NORMED, "gemma3n gemma3n_text gemma4 gemma4_text"),
    (_NORMED, "gemma4_vision gemma4_unified gemma4_unified_text gemma4_unified_vision"),
    (_NORMED, "diffusion_gemma diffusion_gemma_text embedding_gemma2 embedding_gemma2_text"),
    (_GEMMA, "gemma2 gemma3 gemma3_text t5gemma t5_gemma_module vaultgemma step3p5 step3p7"),
    (_GEMMA, "t5gemma2 t5gemma2_text t5gemma2_encoder t5gemma2_decoder"),
    (_GRANITE, "granite granite_swa granitemoe granitemoe_swa granitemoeshared"),
    (_GRANITE, "granitemoehybrid granite4_vision granite4_vision_text hyperclovax"),
    (_KEYS, "falcon_h1"),
    (_YARN, "deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa longcat_flash"),
    (_YARN, "minicpm3 youtu hy_v4 axk1 axk2 bailing_hybrid mistral_large4 mistral_large4_text"),
    (_TEMPERATURE, "llama4 llama4_text mistral4 ministral3"),
    (_WIDTH, "cvt groupvit groupvit_vision_model"),
    (_PAIRS, "zamba zamba2"),
    (_DISENTANGLED, "deberta deberta-v2 sew-d"),
    (_COSINE, "swinv2 swin2sr"),
    (_INKLING, "inkling_text inkling_mm_model"),
)
SHIPPED: dict[str, Shipped] = {name: shipped for shipped, names in _FAMILIES for name in names.split()}
