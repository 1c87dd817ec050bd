"""FlashAttention 2, 3 and 4: tokens before heads, causal and windows aligned at the last query and the last key.

The same names mean the same in all versions, and an argument that no version here describes is named. A window side of
-1 has no limit, a soft cap of 0 is off. The cap comes before ALiBi, and both before anything is hidden.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from levelhead.call.scaling import usual
from levelhead.watching.functions import packed
from levelhead.watching.functions.known import Followed, Given, Known, Qkv, unknown_options
from levelhead.watching.measure import Call, call_of

_DESCRIBED = "q k v qkv kv softmax_scale causal window_size softcap alibi_slopes s_aux learnable_sink"
_VARLEN = "cu_seqlens cu_seqlens_q cu_seqlens_k seqused_q seqused_k block_table page_table"
_CACHE = "k_cache v_cache cache_seqlens cache_batch_idx block_table page_table"
# Speed, dropout of weights after the softmax, and what else is returned: nothing that the logits depend on.
_WITHOUT_EFFECT = (
    "dropout_p deterministic return_attn_probs return_softmax return_softmax_lse return_lse num_splits pack_gqa "
    "sm_margin max_seqlen max_seqlen_q max_seqlen_k scheduler_metadata v_descale num_heads_q rotary_interleaved out"
)
_COMMON = frozenset(f"{_DESCRIBED} {_WITHOUT_EFFECT}".split())


def window(size: Any) -> dict[str, int | None]:
    """A window (left, right) as fields of `Scoring`."""
    left, right = (None if n is None or n < 0 else int(n) for n in ((None, None) if size is None else size))
    return {"left": left, "right": right}


def _fields(given: Given) -> dict[str, Any]:
    sinks = given.get("s_aux")
    sinks = given.get("learnable_sink") if sinks is None else sinks
    softcap = given.get("softcap") or None
    return {"causal": bool(given.get("causal")), "softcap": softcap, "sinks": sinks, **window(given.get("window_size"))}


def _scale(given: Given, q: Tensor) -> float:
    scale = given.get("softmax_scale")
    return usual(q.shape[-1]) if scale is None else float(scale)


def _with_alibi(call: Call, slopes: Tensor | None) -> Call:
    if slopes is None:
        return call
    if slopes.dim() == 1:
        return replace(call, scoring=call.scoring._replace(alibi=slopes))
    start = 0 if call.scoring.query_start is None else call.scoring.query_start
    return replace(call, score_mod=packed.per_row_alibi(slopes, start))


# ---- batches


def _split(given: Given) -> Qkv:
    """q, k and v of a call, whichever of them were passed as one tensor; tokens before heads."""
    if given.get("qkv") is not None:
        qkv, heads = given["qkv"], given.get("num_heads_q")
        if heads is None:
            q, k, v = qkv.unbind(-3)
            return q, k, v
        shared = (qkv.shape[-2] - heads) // 2
        q, k, v = qkv.split([heads, shared, shared], -2)
        return q, k, v
    if given.get("kv") is not None:
        k, v = given["kv"].unbind(-3)
        return given["q"], k, v
    return given["q"], given["k"], given["v"]


def _whole(given: Given) -> Call:
    q, k, _ = _split(given)
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    call = call_of(q, k, _scale(given, q), k.shape[2] - q.shape[2], **_fields(given))
    return _with_alibi(call, given.get("alibi_slopes"))


def _varlen(given: Given) -> Call:
    q, k, _ = _split(given)
    fields = _fields(given)
    cu_q = given.get("cu_seqlens_q", given.get("cu_seqlens"))
    cu_k = given.get("cu_seqlens_k", given.get("cu_seqlens"))
    table = given.get("block_table", given.get("page_table"))
    used_q, used_k = given.get("seqused_q"), given.get("seqused_k")
    if table is not None:
        n_q = packed.lengths(cu_q) if used_q is None else used_q.long()
        n_k = packed.lengths(cu_k) if used_k is None else used_k.long()
        pages = packed.from_pages(k, table)
        call = packed.in_rows(packed.padded(q, cu_q, n_q), pages, n_q, n_k, _scale(given, q), **fields)
    else:
        call = packed.call(q, k, cu_q, cu_k, _scale(given, q), used_q=used_q, used_k=used_k, **fields)
    return _with_alibi(call, given.get("alibi_slopes"))


def _cached(given: Given) -> Call:
    """The cache already contains the new keys: the call has run."""
    q, cache, new = given["q"].transpose(1, 2), given["k_cache"], given.get("k")
    table = given.get("block_table", given.get("page_table"))
    rows = given.get("cache_batch_idx")
    if table is not None:
        k = packed.from_pages(cache, table)
    else:
        k = (cache[: q.shape[0]] if rows is None else cache[rows.long()]).transpose(1, 2)
    n = given.get("cache_seqlens")
    n = k.shape[2] if n is None else n
    n_k = n.long() if isinstance(n, Tensor) else torch.full((q.shape[0],), n, device=q.device)
    n_k = n_k if new is None else n_k + new.shape[1]
    call = packed.in_rows(q, k, None, n_k, _scale(given, q), **_fields(given))
    return _with_alibi(call, given.get("alibi_slopes"))


# ---- what is refused


def _refuses_whole(given: Given) -> str | None:
    return unknown_options(given, _COMMON)


def _refuses_varlen(given: Given) -> str | None:
    options = unknown_options(given, _COMMON | set(_VARLEN.split()))
    if options is not None:
        return options
    slopes = given.get("alibi_slopes")
    if slopes is not None and slopes.dim() > 1:
        return "alibi_slopes that differ between sequences"
    if torch.compiler.is_compiling() and given.get("cu_seqlens") is None:
        others = (given.get(name) for name in ("seqused_q", "seqused_k", "block_table", "page_table"))
        if packed.needs_rows(given["cu_seqlens_q"], given["cu_seqlens_k"], *others):
            return "other lengths of queries than of keys in a compiled graph"
    return None


def _refuses_cached(given: Given) -> str | None:
    options = unknown_options(given, _COMMON | set(_CACHE.split()))
    if options is None and given.get("k") is not None and given.get("cache_seqlens") is None:
        return "new keys without cache_seqlens"
    return options


# ---- the table


def _heads_first(x: Tensor) -> Tensor:
    """(B, T, H, D) or (tokens, H, D) as (B, H, T, D)."""
    return x.transpose(1, 2) if x.dim() == 4 else x.transpose(0, 1)[None]


def _followed(given: Given) -> Followed:
    found = []
    for index, name in enumerate("qkv"):
        source = next(x for x in ("qkv", "kv" if index else "q", name) if given.get(x) is not None)

        def view(gradient: Tensor, index: int = index, source: str = source) -> Tensor:
            return _heads_first(_split({**given, source: gradient})[index])

        found.append((f"d{name}", given[source], view))
    return tuple(found)


def _followed_cache(given: Given) -> Followed:
    return (("dq", given["q"], _heads_first), ("dk", given["k_cache"], _heads_first))


def _places(*names: str) -> tuple[str, ...]:
    return tuple(f"{module}:{name}" for name in names for module in _MODULES)


# FlashAttention 2; 3, under its two names; 4; vLLM's copy; and what transformers loaded, from a package or a hub.
_MODULES = (
    "flash_attn",
    "flash_attn.flash_attn_interface",
    "flash_attn_interface",
    "flash_attn_3.flash_attn_interface",
    "flash_attn.cute",
    "flash_attn.cute.interface",
    "vllm.vllm_flash_attn",
    "vllm.vllm_flash_attn.flash_attn_interface",
)
_LOADED = "transformers.modeling_flash_attention_utils"

KNOWN = (
    Known(
        (*_places("flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_kvpacked_func"), f"{_LOADED}:_flash_fn"),
        "(B, T, H, D), also with q, k, v or k, v in one tensor; causal and windows bottom-right",
        _whole,
        _followed,
        _refuses_whole,
    ),
    Known(
        (
            *_places("flash_attn_varlen_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_varlen_kvpacked_func"),
            f"{_LOADED}:_flash_varlen_fn",
        ),
        "(tokens, H, D) with cumulative lengths; causal and windows bottom-right in each sequence",
        _varlen,
        _followed,
        _refuses_varlen,
    ),
    Known(
        (*_places("flash_attn_with_kvcache"), f"{_LOADED}:_flash_with_kvcache_fn"),
        "(B, T, H, D) against a cache that the call extends, also in pages; bottom-right at each row's last key",
        _cached,
        _followed_cache,
        _refuses_cached,
    ),
)
