"""What the arguments of transformers' attention functions mean, by implementation.

An eager function that does more than softmax(q kᵀ · scale + mask) v is not described by its arguments: the softmax
inside it is observed instead, and so is that of a module from before the attention interface.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.call.scaling import usual
from levelhead.torch.huggingface.survey import attending_modules, eager_functions, understood
from levelhead.watching.functions import packed
from levelhead.watching.functions.torch_functions import fits_a_graph, with_functions
from levelhead.watching.measure import Call, call_of

is_understood = functools.cache(understood)


def eager_is_understood(module: nn.Module) -> bool:
    """Whether each eager function that a module may call is softmax(q kᵀ · scale + mask) v; read before Dynamo traces,
    which cannot read code."""
    kind = type(module)
    if kind not in _understood:
        _understood[kind] = all(understood(f) for f in eager_functions(module))
    return _understood[kind]


_understood: dict[type, bool] = {}


def forms_softmax_by_hand(module: nn.Module) -> bool:
    """Whether it is a transformers module from before the interface; some still are."""
    if not type(module).__module__.startswith("transformers.models."):
        return False
    own = next((attending for attending in attending_modules(module) if attending.module is module), None)
    return own is not None and own.by_hand and not own.interface


# ---- what the arguments mean

FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")


def innermost(function: Any) -> Any:
    """The function inside levelhead's own wrappers, which are partials of it."""
    while isinstance(function, functools.partial) and function.args and callable(function.args[0]):
        function = function.args[0]
    return function


def origin(name: str, function: Any) -> str:
    """Whose function it is: "eager" (a model's own), "sdpa" (calls torch's function), "flex", "flash", or "other": one
    that somebody registered. A paged one reads its keys from a cache that its arguments do not contain."""
    own = str(getattr(innermost(function), "__module__", "")).startswith("transformers.")
    if name == "eager":
        return "eager"
    if own and not name.startswith("paged|"):
        return {"sdpa": "sdpa", "flex_attention": "flex"}.get(name, "flash" if name in FLASH else "other")
    return "other"


def describe(
    kind: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *args: Any,
    scaling: Any = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **rest: Any,
) -> Call:
    """The call that these arguments of an implementation mean."""
    S, D = key.shape[2], query.shape[3]
    scale = usual(D) if scaling is None else scaling
    if isinstance(scale, Tensor) and scale.numel() == 1:
        query, scale = query * scale, 1.0
    sinks = s_aux if s_aux is not None else getattr(module, "sinks", None)
    if kind == "flash":
        return _flash(module, query, key, attention_mask, scale, softcap=softcap, sinks=s_aux, **rest)
    blocks = attention_mask if hasattr(attention_mask, "mask_mod") else None
    mask = None if attention_mask is None or blocks is not None else attention_mask[..., :S]
    call = with_functions(call_of(query, key, scale, mask=mask, softcap=softcap, sinks=sinks), blocks)
    return replace(call, scoring=call.scoring._replace(mask=_joined(call.scoring.mask, position_bias)))


def refuses(kind: str, query: Tensor, key: Tensor, mask: Any, rest: Mapping[str, Any]) -> str | None:
    """What of such a call is not described; None: nothing."""
    if kind == "flash" and rest.get("cache") is not None:
        return "a paged cache"
    if not torch.compiler.is_compiling():
        return None
    if kind == "flex" and hasattr(mask, "mask_mod") and not fits_a_graph(mask, query, key):
        return "a mask_mod over that many tokens in a compiled graph"
    if kind == "flash" and (mask is not None or rest.get("cu_seq_lens_q") is not rest.get("cu_seq_lens_k")):
        return "padding in a compiled graph"
    return None


def _joined(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    if mask is None or bias is None:
        return bias if mask is None else mask
    if mask.dtype is torch.bool:
        return torch.where(mask, bias, -torch.inf)
    return mask + bias


# ---- FlashAttention


def _flash(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    scale: float,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: Any = None,
    max_length_k: Any = None,
    **rest: Any,
) -> Call:
    """As transformers' `_flash_attention_forward` would call FlashAttention: without padding, packed rows apart."""
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    side = None if sliding_window is None or k.shape[2] <= sliding_window else sliding_window - 1
    options = {"softcap": rest["softcap"] or None, "sinks": rest["sinks"]}
    fields: dict[str, Any] = {"causal": causal, "left": side, "right": side, **options}
    if mask is not None:
        return _unpadded(q, k, mask, scale, fields)
    longest = max_length_q is not None and max_length_k is not None
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None and longest:
        tokens_q, tokens_k = (x.transpose(1, 2).flatten(0, 1) for x in (q, k))
        return packed.call(tokens_q, tokens_k, cu_seq_lens_q, cu_seq_lens_k, scale, **fields)
    if position_ids is not None and q.shape[0] == 1 and q.shape[2] == position_ids.numel() > 1:
        # A position that does not follow the one before it begins a document.
        ids = position_ids.reshape(-1)
        first = ids == ids.min()
        in_order = bool((ids == torch.arange(len(ids), device=ids.device) + ids.min()).all())
        if not in_order and first[0]:
            each = (first.cumsum(0) - 1)[None]
            return call_of(q, k, scale, query_segments=each, key_segments=each, **fields)
    return call_of(q, k, scale, k.shape[2] - q.shape[2], **fields)


def _unpadded(q: Tensor, k: Tensor, mask: Tensor, scale: float, fields: dict[str, Any]) -> Call:
    """The call without the tokens that a mask (B, tokens) marks as padding: they are neither keys nor queries."""
    T = q.shape[2]
    k = k[:, :, : mask.shape[-1]]  # of a static cache
    shown = mask.bool()
    S = k.shape[2]
    if T == S:
        rows = shown
    elif T == 1:
        rows = torch.ones_like(shown[:, :1])
    else:
        rows = shown[:, -T:]
    # Sequences without padding: the order of the tokens stays, their places change.
    keys, queries = (_order(x) for x in (shown, rows))
    n_k, n_q = shown.sum(-1), rows.sum(-1)
    q, k = _gathered(q, queries), _gathered(k, keys)
    return packed.in_rows(q, k, n_q, n_k, scale, **fields)


def _order(shown: Tensor) -> Tensor:
    """The places of the tokens that exist, in order, then the others."""
    return torch.argsort((~shown).to(torch.int8), dim=-1, stable=True)


def _gathered(x: Tensor, order: Tensor) -> Tensor:
    return x.gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
