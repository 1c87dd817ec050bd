"""TransformerEngine's `DotProductAttention`, a module: what its attributes and the arguments of `forward` mean.

An argument replaces the attribute of the same name. Padding lies at the end of each row. "causal" aligns the first
query and key, "causal_bottom_right" the last ones; windows without "causal" are aligned at the last ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from levelhead.call.segments import alibi_slopes
from levelhead.watching.functions import packed
from levelhead.watching.functions.flash_attn import window
from levelhead.watching.functions.known import Followed, Given, Known, unknown_options
from levelhead.watching.measure import Call, call_of

_ARGUMENTS_NAMES = (
    "self query_layer key_layer value_layer attention_mask qkv_format cu_seqlens_q cu_seqlens_kv max_seqlen_q "
    "max_seqlen_kv attn_mask_type window_size bottom_right_diagonal checkpoint_core_attention "
    "core_attention_bias_type core_attention_bias alibi_slopes fast_zero_fill num_splits qkv_interleave_dim "
    "use_qk_l2norm_in_kernel"
)
_ARGUMENTS = frozenset(_ARGUMENTS_NAMES.split())
_FORMATS = ("sbhd", "bshd", "thd")
_MASKS = ("no_mask", "padding", "causal", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right")


def _setting(given: Given, name: str) -> Any:
    x = given.get(name)
    return getattr(given["self"], name, None) if x is None else x


def _mask_type(given: Given) -> str:
    kind = str(_setting(given, "attn_mask_type")).replace(",", "_")
    return "padding_causal" if kind == "causal_padding" else kind


def _scale(module: Any) -> float | None:
    """The softmax scale: an attribute of the module, or of the one of its parts that computes."""
    for part in ("", "unfused_attention", "flash_attention", "fused_attention"):
        scale = getattr(getattr(module, part, None) if part else module, "softmax_scale", None)
        if scale is not None:
            return float(scale)
    return None


def _heads_first(x: Tensor, layout: str) -> Tensor:
    if layout == "thd":
        return x.transpose(0, 1)[None]
    return x.permute(1, 2, 0, 3) if layout == "sbhd" else x.transpose(1, 2)


def _describe(given: Given) -> Call:
    layout, kind = _setting(given, "qkv_format"), _mask_type(given)
    scale = _scale(given["self"])
    assert scale is not None  # refused before
    aligned = _setting(given, "bottom_right_diagonal")
    bottom_right = kind not in ("causal", "padding_causal") if aligned is None else bool(aligned)
    fields: dict[str, Any] = {"causal": "causal" in kind, **window(_setting(given, "window_size"))}
    fields["right"] = None if fields["causal"] else fields["right"]
    fields["sinks"] = getattr(given["self"], "softmax_offset", None)
    if layout == "thd":
        cu_q, cu_k = given["cu_seqlens_q"], given["cu_seqlens_kv"]
        tokens = given["query_layer"], given["key_layer"]
        return packed.call(*tokens, cu_q, cu_k, scale, bottom_right=bottom_right, **fields)
    q, k = (_heads_first(given[name], layout) for name in ("query_layer", "key_layer"))
    fields |= _bias(given, q, scale)
    if "padding" in kind:
        n_q, n_k = _lengths(given)
        return packed.in_rows(q, k, n_q, n_k, scale, bottom_right=bottom_right, **fields)
    if kind == "arbitrary":
        hidden = ~given["attention_mask"]
        fields["mask"] = hidden if fields.get("mask") is None else fields["mask"].masked_fill(~hidden, -torch.inf)
    return call_of(q, k, scale, k.shape[2] - q.shape[2] if bottom_right else 0, **fields)


def _bias(given: Given, q: Tensor, scale: float) -> dict[str, Any]:
    kind = given.get("core_attention_bias_type", "no_bias")
    if kind == "alibi":
        slopes = given.get("alibi_slopes")
        return {"alibi": torch.from_numpy(alibi_slopes(q.shape[1])).to(q.device) if slopes is None else slopes}
    if kind == "no_bias":
        return {}
    bias = given["core_attention_bias"]
    return {"mask": bias * scale if kind == "pre_scale_bias" else bias}


def _lengths(given: Given) -> tuple[Tensor, Tensor]:
    """How many queries and keys of each row are no padding."""
    if given.get("cu_seqlens_q") is not None:
        return packed.lengths(given["cu_seqlens_q"]), packed.lengths(given["cu_seqlens_kv"])
    masks = given["attention_mask"]
    q, k = masks if isinstance(masks, tuple | list) else (masks, masks)
    return (~q).flatten(1).sum(1), (~k).flatten(1).sum(1)


def _refuses(given: Given) -> str | None:
    module, kind = given["self"], _mask_type(given)
    layout, bias = _setting(given, "qkv_format"), given.get("core_attention_bias_type", "no_bias")
    if layout not in _FORMATS or kind not in (*_MASKS, "arbitrary"):
        return f"qkv_format {layout!r} with attn_mask_type {kind!r}"
    if given.get("query_layer") is None or given.get("key_layer") is None:
        return "packed q, k, v"
    if _scale(module) is None:
        return "a softmax_scale that the module does not keep"
    if getattr(module, "cp_group", None) is not None:
        return "context parallelism"
    if bias not in ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi") or (layout == "thd" and bias != "no_bias"):
        return f"core_attention_bias_type {bias!r}"
    slopes = given.get("alibi_slopes")
    if slopes is not None and slopes.dim() > 1:
        return "alibi_slopes that differ between rows"
    if layout == "thd" and given.get("cu_seqlens_q") is None:
        return "'thd' without cu_seqlens_q"
    needs_lengths = layout == "thd" or "padding" in kind
    if torch.compiler.is_compiling() and needs_lengths and given.get("cu_seqlens_q") is not given.get("cu_seqlens_kv"):
        return "lengths in a compiled graph"
    return unknown_options(given, _ARGUMENTS)


def _followed(given: Given) -> Followed:
    layout = _setting(given, "qkv_format")

    def view(gradient: Tensor) -> Tensor:
        return _heads_first(gradient, layout)

    names = (("dq", "query_layer"), ("dk", "key_layer"), ("dv", "value_layer"))
    return tuple((name, given[source], view) for name, source in names if given.get(source) is not None)


KNOWN = (
    Known(
        (
            "transformer_engine.pytorch:DotProductAttention",
            "transformer_engine.pytorch.attention:DotProductAttention",
            "transformer_engine.pytorch.attention.dot_product_attention:DotProductAttention",
            "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention:DotProductAttention",
        ),
        "sbhd, bshd or thd; causal top-left or bottom-right by attn_mask_type; padding by lengths; sinks",
        _describe,
        _followed,
        _refuses,
        is_class=True,
    ),
)
