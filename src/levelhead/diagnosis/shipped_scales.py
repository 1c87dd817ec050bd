"""Architectures that use another scale than 1/√d_k on purpose, by their Hugging Face `model_type`.

From the modelling sources of transformers 5.22. Only deliberate factors of the logits are here; other places of the
same 1/√d_k (before the product, half on each side) need no entry. An architecture that is not listed gets no exception.
Where a configuration sets the scale, `configured` computes it; a run keeps the number, so that it can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Shipped:
    """The scale of an architecture, as a rule or as a number of its configuration."""

    rule: str | None
    why: str
    number: Callable[[Any, int, int], float | None] | None = None  # of configuration, d_k, and the layer from 0 on


class Configured(NamedTuple):
    """What a configuration says about the scale; a scale of None: nothing, or no number."""

    scale: float | None = None
    by: str = ""


def configured(config: Any, architecture: str | None, d_k: int, layer: int = 0, kind: str | None = None) -> Configured:
    """The right scale of a module by its configuration, if that is another than 1/√d_k.

    Args:
        layer: its number from 0 on. kind: its entry in the configuration's `layer_types`.
    """
    if config is None or d_k <= 0:
        return Configured()
    ships, base, words = SHIPPED.get(architecture or ""), 1.0 / math.sqrt(d_k), []
    if ships is not None:
        if ships.number is None:
            return Configured()
        own = ships.number(config, d_k, layer)
        if own is None:
            return Configured(None, ships.why)
        base = own
        words.append(ships.why)
    rotary = _rotary_factor(config, kind)
    if rotary is None:
        return Configured(None, "its positions are scaled in a part of the head only")
    if rotary != 1.0:
        words.append(f"its rotary embedding multiplies q and k by {rotary:.4g} each")
    return Configured(base * rotary**2, "; ".join(words)) if words else Configured()


def _rotary(config: Any, kind: str | None) -> Mapping[str, Any]:
    """The parameters of the rotary embedding."""
    rotary = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(rotary, Mapping):
        return {}
    if isinstance(rotary.get(kind), Mapping):
        return rotary[kind]  # type: ignore[no-any-return]
    nested = [x for x in rotary.values() if isinstance(x, Mapping)]
    return nested[0] if nested and len(nested) == len(rotary) and all(x == nested[0] for x in nested) else rotary


def _mscale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _rotary_factor(config: Any, kind: str | None) -> float | None:
    """What cos and sin are multiplied with; None: in a part of the head only."""
    rotary = _rotary(config, kind)
    name = rotary.get("rope_type", rotary.get("type"))
    if name not in ("yarn", "longrope"):
        return 1.0
    given, factor = rotary.get("attention_factor"), rotary.get("factor")
    if given is None and name == "yarn":
        over, under = rotary.get("mscale"), rotary.get("mscale_all_dim")
        if factor is None:
            return None
        given = _mscale(factor, over) / _mscale(factor, under) if over and under else _mscale(factor)
    elif given is None:
        longest = getattr(config, "max_position_embeddings", None)
        original = rotary.get("original_max_position_embeddings") or longest
        factor = factor or (longest / original if longest and original else None)
        if factor is None or not original or original <= 1:
            return None
        given = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    share = rotary.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    partly = (share is not None and share != 1.0) or getattr(config, "qk_nope_head_dim", 0)
    return None if partly and given != 1.0 else float(given)


# ---- numbers of configurations


def _of(config: Any, name: str) -> float | None:
    x = getattr(config, name, None)
    return float(x) if isinstance(x, int | float) and x > 0 else None


def _gemma(config: Any, d_k: int, layer: int) -> float | None:
    scalar = _of(config, "query_pre_attn_scalar")
    return None if scalar is None else 1.0 / math.sqrt(scalar)


def _granite(config: Any, d_k: int, layer: int) -> float | None:
    return _of(config, "attention_multiplier")


def _keys(config: Any, d_k: int, layer: int) -> float | None:
    times = _of(config, "key_multiplier")
    return None if times is None else times / math.sqrt(d_k)


def _yarn(config: Any, d_k: int, layer: int) -> float | None:
    rotary = _rotary(config, None)
    name, all_dim = rotary.get("rope_type", rotary.get("type", "default")), rotary.get("mscale_all_dim", 0)
    times = _mscale(rotary.get("factor", 1.0), all_dim) if all_dim and name != "default" else 1.0
    return times**2 / math.sqrt(d_k)


def _pairs(config: Any, d_k: int, layer: int) -> float | None:
    return 1.0 / math.sqrt(d_k / 2)


def _disentangled(config: Any, d_k: int, layer: int) -> float | None:
    kinds = getattr(config, "pos_att_type", None) or () if getattr(config, "relative_attention", False) else ()
    kinds = kinds.split("|") if isinstance(kinds, str) else kinds
    return 1.0 / math.sqrt((1 + len({"c2p", "p2c"} & set(kinds))) * d_k)


def _by_layer(config: Any, d_k: int, layer: int) -> float | None:
    base = 1.0 / math.sqrt(d_k) if getattr(config, "scale_attn_weights", True) else 1.0
    return base / (layer + 1) if getattr(config, "scale_attn_by_inverse_layer_idx", False) else base


def _usual(config: Any, d_k: int, layer: int) -> float | None:
    return 1.0 / math.sqrt(d_k)


_T5 = Shipped("none", "T5 models fold the scale into the initialisation of the q projection")
_WITHOUT = Shipped("none", "this family was trained without a scale")
_NORMED = Shipped("none", "this family leaves the size of q and k to its QK-norm")
_GEMMA = Shipped(None, "this family divides by √query_pre_attn_scalar of its configuration", _gemma)
_GRANITE = Shipped(None, "this family multiplies by attention_multiplier of its configuration", _granite)
_KEYS = Shipped(None, "this family multiplies keys by key_multiplier of its configuration", _keys)
_YARN = Shipped(None, "with YaRN this family multiplies 1/√d_k by mscale squared", _yarn)
_TEMPERATURE = Shipped(None, "this family adds a temperature that grows with the position", _usual)
_WIDTH = Shipped("1/sqrt(d)", "this architecture was trained with 1/√d of the whole width")
_PAIRS = Shipped(None, "its heads read two streams side by side and it divides by √(d_k/2)", _pairs)
_DISENTANGLED = Shipped(None, "its logit sums up to three terms, hence 1/√(3 d_k)", _disentangled)
_COSINE = Shipped(None, "its logits are cosines times a learned temperature")
_INKLING = Shipped("1/d_k", "this family scales by 1/d_k, behind a QK-norm")
_BY_LAYER = Shipped(None, "its configuration may leave the scale out, or divide it by the layer's number", _by_layer)

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
    (_TEMPERATURE, "llama4 llama4_text ministral3"),
    (_YARN, "mistral4"),
    (_WIDTH, "cvt"),
    (_PAIRS, "zamba zamba2"),
    (_DISENTANGLED, "deberta deberta-v2 deberta_v2 sew-d sew_d"),
    (_COSINE, "swinv2 swin2sr"),
    (_INKLING, "inkling_text inkling_mm_model"),
    (_BY_LAYER, "gpt2 decision_transformer imagegpt"),
)
SHIPPED: dict[str, Shipped] = {name: shipped for shipped, names in _FAMILIES for name in names.split()}
