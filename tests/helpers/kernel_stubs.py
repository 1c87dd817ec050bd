"""Stand-ins for attention libraries that need a GPU: the signatures of flash_attn, xformers and TransformerEngine,
computed by plain torch, with their layouts and alignments.

Written from the libraries' documentation. `installed` puts them into `sys.modules` for a while.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None, bias: Tensor, softcap: float = 0.0) -> Tensor:
    """softmax(q kᵀ · scale + bias) v for (B, T, H, D); `bias` broadcasts to (B, H, T, S), -inf hides."""
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
    s = torch.einsum("bthd,bshd->bhts", q, k) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    weights = torch.softmax(s + bias.to(s.dtype), -1).nan_to_num(0.0)
    return torch.einsum("bhts,bshd->bthd", weights, v)


def positional(
    T: int, S: int, causal: bool, window: Any = (-1, -1), slopes: Tensor | None = None, bottom_right: bool = True
) -> Tensor:
    """What position alone adds to the logits, (1 or H, T, S)."""
    i = torch.arange(T)[:, None] + (S - T if bottom_right else 0)
    j = torch.arange(S)[None]
    left, right = (-1 if n is None else n for n in window)
    hidden = torch.zeros(T, S, dtype=torch.bool)
    hidden |= (j > i) if causal else hidden
    hidden |= (j < i - left) if left >= 0 else hidden
    hidden |= (j > i + right) if right >= 0 else hidden
    bias = torch.zeros(T, S).masked_fill(hidden, -math.inf)[None]
    return bias if slopes is None else bias - slopes[:, None, None] * (i - j).abs()


# ---- flash_attn 2


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    bias = positional(q.shape[1], k.shape[1], causal, window_size, alibi_slopes)
    return attend(q, k, v, softmax_scale, bias, softcap)


def flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0):
    return flash_attn_func(*qkv.unbind(2), dropout_p, softmax_scale, causal, window_size, softcap)


def flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0):
    return flash_attn_func(q, *kv.unbind(2), dropout_p, softmax_scale, causal, window_size, softcap)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    assert block_table is None
    out = torch.zeros_like(q)
    bounds = zip(cu_seqlens_q[:-1], cu_seqlens_q[1:], cu_seqlens_k[:-1], cu_seqlens_k[1:], strict=True)
    for a, b, c, d in bounds:
        part = (q[None, a:b], k[None, c:d], v[None, c:d])
        out[a:b] = flash_attn_func(*part, 0.0, softmax_scale, causal, window_size, softcap, alibi_slopes)[0]
    return out


def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False):
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return flash_attn_varlen_func(*qkv.unbind(1), *lengths, dropout_p, softmax_scale, causal)


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
):  # fmt: skip
    out = torch.zeros_like(q)
    for b, n in enumerate(cache_seqlens.tolist()):
        if k is not None:
            k_cache[b, n : n + k.shape[1]], v_cache[b, n : n + k.shape[1]] = k[b], v[b]
            n += k.shape[1]
        row = (q[b : b + 1], k_cache[b : b + 1, :n], v_cache[b : b + 1, :n])
        out[b] = flash_attn_func(*row, 0.0, softmax_scale, causal, window_size, softcap, alibi_slopes)[0]
    return out


# ---- flash_attn 3


def flash_attn_3_func(
    q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
    sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    return attend(q, k, v, softmax_scale, positional(q.shape[1], k.shape[1], causal, window_size), softcap)


# ---- xformers


class LowerTriangularMask:
    def materialize(self, shape: Any, dtype: Any = torch.float32, device: Any = "cpu") -> Tensor:
        return positional(*shape[-2:], True, bottom_right=False)[0].expand(shape).to(dtype)


class LowerTriangularFromBottomRightMask(LowerTriangularMask):
    def materialize(self, shape: Any, dtype: Any = torch.float32, device: Any = "cpu") -> Tensor:
        return positional(*shape[-2:], True)[0].expand(shape).to(dtype)


class LocalAttentionFromBottomRightMask(LowerTriangularMask):
    def __init__(self, window_left: int, window_right: int) -> None:
        self.window_left, self.window_right = window_left, window_right

    def materialize(self, shape: Any, dtype: Any = torch.float32, device: Any = "cpu") -> Tensor:
        return positional(*shape[-2:], False, (self.window_left, self.window_right))[0].expand(shape).to(dtype)


class SeqLenInfo:
    def __init__(self, lengths: list[int]) -> None:
        self.seqstart_py = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
        self.seqstart = torch.tensor(self.seqstart_py, dtype=torch.int32)


class BlockDiagonalMask:
    causal, bottom_right = False, False

    def __init__(self, q_seqinfo: SeqLenInfo, k_seqinfo: SeqLenInfo) -> None:
        self.q_seqinfo, self.k_seqinfo = q_seqinfo, k_seqinfo

    @classmethod
    def from_seqlens(cls, q_seqlen: list[int], kv_seqlen: list[int] | None = None) -> Any:
        first = SeqLenInfo(q_seqlen)
        return cls(first, first if kv_seqlen is None else SeqLenInfo(kv_seqlen))

    def materialize(self, shape: Any, dtype: Any = torch.float32, device: Any = "cpu") -> Tensor:
        bias = torch.full(shape[-2:], -math.inf)
        q, k = self.q_seqinfo.seqstart_py, self.k_seqinfo.seqstart_py
        for a, b, c, d in zip(q, q[1:], k, k[1:], strict=False):
            bias[a:b, c:d] = positional(b - a, d - c, self.causal, bottom_right=self.bottom_right)[0]
        return bias.expand(shape).to(dtype)


class BlockDiagonalCausalMask(BlockDiagonalMask):
    causal = True


class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalCausalMask):
    bottom_right = True


def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None):
    given = query.shape
    q, k, v = (x[:, :, None] if x.dim() == 3 else x.flatten(2, -2) for x in (query, key, value))
    bias = torch.zeros(()) if attn_bias is None else attn_bias
    if not isinstance(bias, Tensor):
        bias = bias.materialize((q.shape[1], k.shape[1]))
    elif bias.dim() == 3:
        bias = bias[:, None]
    elif bias.dim() == 5:
        bias = bias.flatten(1, 2)
    return attend(q, k, v, scale, bias).reshape(*given[:-1], -1)


# ---- TransformerEngine


class DotProductAttention(nn.Module):
    def __init__(
        self, num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0, qkv_format="sbhd",
        attn_mask_type="causal", window_size=None, softmax_scale=None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_attention_heads, self.qkv_format, self.attn_mask_type = num_attention_heads, qkv_format, attn_mask_type
        self.window_size = window_size
        self.unfused_attention = nn.Module()
        self.unfused_attention.softmax_scale = 1 / math.sqrt(kv_channels) if softmax_scale is None else softmax_scale

    def forward(
        self, query_layer, key_layer, value_layer, attention_mask=None, qkv_format=None, cu_seqlens_q=None,
        cu_seqlens_kv=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, max_seqlen_q=None, max_seqlen_kv=None,
        attn_mask_type=None, window_size=None, checkpoint_core_attention=False, core_attention_bias_type="no_bias",
        core_attention_bias=None, alibi_slopes=None, fast_zero_fill=True, inference_params=None,
    ):  # fmt: skip
        layout, kind = qkv_format or self.qkv_format, attn_mask_type or self.attn_mask_type
        window, scale = window_size or self.window_size or (-1, -1), self.unfused_attention.softmax_scale
        bottom_right = kind not in ("causal", "padding_causal")
        q, k, v = query_layer, key_layer, value_layer
        if layout == "thd":
            out = torch.zeros_like(q)
            for a, b in itertools.pairwise(cu_seqlens_q):
                bias = positional(int(b - a), int(b - a), "causal" in kind, window)
                out[a:b] = attend(q[None, a:b], k[None, a:b], v[None, a:b], scale, bias)[0]
            return out.flatten(-2)
        if layout == "sbhd":
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        bias = positional(q.shape[1], k.shape[1], "causal" in kind, window, bottom_right=bottom_right)
        if core_attention_bias_type == "post_scale_bias":
            bias = bias + core_attention_bias
        if "padding" in kind:
            bias = bias.masked_fill(attention_mask, -math.inf)
        if kind == "arbitrary":
            bias = bias.masked_fill(attention_mask, -math.inf)
        out = attend(q, k, v, scale, bias)
        out = out.transpose(0, 1) if layout == "sbhd" else out
        return out.flatten(-2)


# ---- as modules

_FLASH_2 = (
    flash_attn_func, flash_attn_qkvpacked_func, flash_attn_kvpacked_func, flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func, flash_attn_with_kvcache,
)  # fmt: skip
_BIASES = (
    LowerTriangularMask, LowerTriangularFromBottomRightMask, LocalAttentionFromBottomRightMask, BlockDiagonalMask,
    BlockDiagonalCausalMask, BlockDiagonalCausalFromBottomRightMask,
)  # fmt: skip
for _bias in _BIASES:
    _bias.__module__ = "xformers.ops.fmha.attn_bias"


def _module(name: str, **names: Any) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(names)
    return module


@contextmanager
def installed() -> Iterator[None]:
    """All of them are in `sys.modules`."""
    two = {f.__name__: f for f in _FLASH_2}
    attention = {"memory_efficient_attention": memory_efficient_attention}
    modules = [
        _module("flash_attn", __version__="2.8.3", **two),
        _module("flash_attn.flash_attn_interface", **two),
        _module("flash_attn_interface", flash_attn_func=flash_attn_3_func),
        _module("xformers"),
        _module("xformers.ops", **attention),
        _module("xformers.ops.fmha", **attention),
        _module("transformer_engine"),
        _module("transformer_engine.pytorch", DotProductAttention=DotProductAttention),
    ]
    before = {module.__name__: sys.modules.get(module.__name__) for module in modules}
    sys.modules |= {module.__name__: module for module in modules}
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
