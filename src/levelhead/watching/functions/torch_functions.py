"""Torch's own functions: `scaled_dot_product_attention`, `flex_attention`, `varlen_attn`.

`scaled_dot_product_attention` puts heads before tokens and aligns causal at the first query and key. `flex_attention`
gives mask and score as functions of positions. `varlen_attn` is packed, and its windows are bottom-right.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from levelhead.call.options import Scoring
from levelhead.call.scaling import usual
from levelhead.torch import sdpa
from levelhead.torch.operators import uniform
from levelhead.watching.functions import packed
from levelhead.watching.functions.flash_attn import window
from levelhead.watching.functions.known import Followed, Given, Known, unknown_options
from levelhead.watching.measure import Call, call_of


def describe_sdpa(qkv: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, causal: bool, scale: Any, gqa: bool) -> Call:
    """A call in torch's convention as ours: positions from the first query. With other than four dimensions it has
    q and k with the same leading ones and one scale: `folded_heads` finds the heads."""
    q, k, v = qkv
    if torch.is_autocast_enabled(q.device.type) and q.dtype is torch.float32:
        dtype = torch.get_autocast_dtype(q.device.type)  # what torch's function casts them to
        q, k, v = (x.to(dtype) for x in (q, k, v))
    factor = usual(q.shape[-1]) if scale is None else float(scale)
    rank = max(x.dim() for x in (q, k, v))
    q, k, _ = sdpa.broadcast(q, k, v, gqa)
    if rank == 4:
        return call_of(q, k, factor, mask=mask, causal=causal)
    k = k.repeat_interleave(q.shape[-3] // max(k.shape[-3], 1), -3) if k.shape[-3] != q.shape[-3] else k
    q, k = (x.reshape(x.shape[x.dim() - rank :]) for x in (q, k))
    return Call(q, k, Scoring(uniform(1, factor, q.device), mask, causal=causal))


# ---- flex_attention

_FLEX_NAMES = "query key value score_mod block_mask scale enable_gqa return_lse kernel_options return_aux training"
_FLEX = frozenset(_FLEX_NAMES.split())


def _flex(given: Given) -> Call:
    q, k = given["query"], given["key"]
    scale = given.get("scale")
    factor = usual(q.shape[-1]) if scale is None else scale
    return with_functions(call_of(q, k, factor), given.get("block_mask"), given.get("score_mod"))


def with_functions(call: Call, block_mask: Any, score_mod: Any = None) -> Call:
    """The call with mask and score as functions; in a graph, which takes no function, the mask as a tensor."""
    if torch.compiler.is_compiling() and block_mask is not None:
        B, H, T = call.q.shape[:3]
        mask = dense(block_mask, (B, H, T, call.k.shape[2]), call.q.device)
        return replace(call, scoring=call.scoring._replace(mask=mask), score_mod=score_mod)
    return replace(call, mask_mod=block_mask, score_mod=score_mod)


def dense(block_mask: Any, shape: tuple[int, int, int, int], device: Any) -> Tensor:
    """A mask given as a function as a tensor that broadcasts to (B, H, T, S)."""
    from torch.nn.attention.flex_attention import create_mask

    B, H, T, S = shape
    counts = block_mask.kv_num_blocks  # (B, H, ...), 1 where the mask does not depend on it
    rows, heads = (n if size > 1 else 1 for n, size in zip((B, H), counts.shape, strict=False))
    return create_mask(block_mask.mask_mod, rows, heads, T, S, device=device)


def _refuses_flex(given: Given) -> str | None:
    options = unknown_options(given, _FLEX)
    if options is None and torch.compiler.is_compiling():
        if given.get("score_mod") is not None:
            return "a score_mod in a compiled graph"
        mask = given.get("block_mask")
        if mask is not None and not fits_a_graph(mask, given["query"], given["key"]):
            return "a mask_mod over that many tokens in a compiled graph"
    return options


# Entries of a mask that a graph may form on every step: 4 MiB.
_IN_A_GRAPH = 1 << 22


def fits_a_graph(mask: Any, q: Tensor, k: Tensor) -> bool:
    """Whether a mask given as a function is small enough to be formed in a compiled graph."""
    rows, heads = mask.kv_num_blocks.shape[:2]
    return bool(rows * heads * q.shape[2] * k.shape[2] <= _IN_A_GRAPH)


def _by_head(gradient: Tensor) -> Tensor:
    return gradient


def _followed_flex(given: Given) -> Followed:
    names = (("dq", "query"), ("dk", "key"), ("dv", "value"))
    return tuple((name, given[source], _by_head) for name, source in names)


# ---- varlen_attn

_VARLEN_NAMES = (
    "query key value cu_seq_q cu_seq_k max_q max_k is_causal scale window_size enable_gqa seqused_k "
    "block_table num_splits return_aux out"
)
_VARLEN = frozenset(_VARLEN_NAMES.split())


def _varlen(given: Given) -> Call:
    q, k, cu_q, cu_k = (given[name] for name in ("query", "key", "cu_seq_q", "cu_seq_k"))
    scale = given.get("scale")
    factor = usual(q.shape[-1]) if scale is None else float(scale)
    fields: dict[str, Any] = {"causal": bool(given.get("is_causal")), **window(given.get("window_size"))}
    used, table = given.get("seqused_k"), given.get("block_table")
    if table is None:
        return packed.call(q, k, cu_q, cu_k, factor, used_k=used, **fields)
    n_q, n_k = packed.lengths(cu_q), packed.lengths(cu_k) if used is None else used.long()
    return packed.in_rows(packed.padded(q, cu_q, n_q), packed.from_pages(k, table), n_q, n_k, factor, **fields)


def _refuses_varlen(given: Given) -> str | None:
    options = unknown_options(given, _VARLEN)
    others = (given.get(name) for name in ("seqused_k", "block_table"))
    in_rows = packed.needs_rows(given["cu_seq_q"], given["cu_seq_k"], *others)
    if options is None and in_rows and torch.compiler.is_compiling():
        return "other lengths of queries than of keys in a compiled graph"
    return options


def _tokens(gradient: Tensor) -> Tensor:
    return gradient.transpose(0, 1)[None]


def _followed_varlen(given: Given) -> Followed:
    names = (("dq", "query"), ("dk", "key"), ("dv", "value"))
    return tuple((name, given[source], _tokens) for name, source in names)


KNOWN = (
    Known(
        ("torch.nn.attention.flex_attention:flex_attention",),
        "(B, H, T, D); score_mod after the scale, then the mask of a BlockMask; positions from 0",
        _flex,
        _followed_flex,
        _refuses_flex,
    ),
    Known(
        ("torch.nn.attention.varlen:varlen_attn", "torch.nn.attention.varlen:varlen_attn_out"),
        "(tokens, H, D) with cumulative lengths; windows bottom-right in each sequence, (-1, 0) is causal",
        _varlen,
        _followed_varlen,
        _refuses_varlen,
    ),
)
