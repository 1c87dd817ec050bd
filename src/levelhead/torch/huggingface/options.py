"""One call of transformers' attention interface: what its arguments mean, computed by levelhead.

The contract is that of `sdpa_attention_forward` and of the models' eager functions. Under "sdpa" a mask is boolean or
missing, and missing may mean causal; under "eager" it is additive with the lowest number for hidden, and missing means
that nothing is hidden. transformers passes all keywords of a model's call down; an option that the function reads and
that is not known here is refused, what it does not read is ignored, as there.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.call.options import Scoring
from levelhead.errors import bad_type, bad_value
from levelhead.torch import sdpa
from levelhead.torch.huggingface.empty_rows import as_given, leveled
from levelhead.torch.huggingface.scores import unread
from levelhead.torch.masks import hides
from levelhead.torch.weights import weights

# The options of the interface that change logits, beside its scale and its mask.
CHANGING_LOGITS = ("position_bias", "softcap", "s_aux", "sliding_window")


def attention(
    eager: bool,
    read: frozenset[str],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | tuple[float, ...] | Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,  # the mask contains it
    output_attentions: bool | None = None,
    cosine: bool = False,  # these two, and a scale per head, are levelhead's own
    log_n: bool = False,
    **rest: Any,
) -> tuple[Tensor, Tensor | None]:
    """(B, T, H, E), as the function of that name in transformers would give it, and weights (B, H, T, S).

    Weights are formed if they are asked for; those of eager attention also when somebody reads them. `read` has the
    options that this function reads: the others mean nothing to it, nor here.
    """
    unknown = [name for name, x in rest.items() if x is not None and name in read]
    if unknown:
        advice = f"{type(module).__name__} means something by it: undo() first"
        raise bad_value("model", "known options", unknown, advice)
    if s_aux is None and getattr(module, "sinks", None) is not None:
        given = f"{type(module).__name__} with sinks that it does not pass on"
        raise bad_value("s_aux", "the sinks", given, "undo() first")
    if eager:
        causal = False  # the mask contains it
        dropout = dropout if module.training else 0.0
    else:
        causal = attention_mask is None and causal_without_mask(module, query, is_causal)
    if isinstance(scaling, Tensor):
        query, scaling = query * scaling, 1.0
    mask = _mask(eager, query.dtype, attention_mask, position_bias)
    original = query, mask
    if s_aux is None:  # else a query without keys has its sink
        query, mask = leveled(query, mask)
    grouped = query.dim() == 4 and query.shape[1] != key.shape[1]
    options: dict[str, Any] = {"scale": scaling, "enable_gqa": grouped}
    more: dict[str, Any] = {"softcap": softcap, "sinks": s_aux, "cosine": cosine, "log_n": log_n}
    if softcap is None and s_aux is None and not (cosine or log_n or isinstance(scaling, tuple)):
        out = sdpa.scaled_dot_product_attention(query, key, value, mask, dropout, causal, **options)
    else:
        out = sdpa.extended(query, key, value, mask, dropout, causal, **options, **more)
    as_given(query, *original)
    out = out.transpose(1, 2).contiguous()
    formed = partial(weights, query, key, Scoring(sdpa.factors(scaling, query), mask, causal=causal, **more))
    if output_attentions or weights_are_collected(module):
        return out, formed()
    # Eager attention always returns them, and few modules look at them.
    readable = eager and not torch.compiler.is_compiling() and torch._C._get_tracing_state() is None
    return out, unread(formed, query, key) if readable else None


def causal_without_mask(module: nn.Module, query: Tensor, is_causal: bool | None) -> bool:
    """Whether "sdpa" hides later keys; a mask would contain causality. One query is the newest, not the first."""
    return query.shape[2] > 1 and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _mask(eager: bool, dtype: torch.dtype, mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Mask and position bias as one; where the mask holds its type's lowest number, −inf."""
    if mask is None:
        return bias
    if mask.dtype is torch.bool:
        if eager:
            advice = "Eager attention would add it as 0 and 1; use 'sdpa', or an additive mask"
            raise bad_type("attention_mask", "an additive mask", "bool", advice)
        return mask if bias is None else torch.where(mask, bias, -torch.inf)
    if not mask.dtype.is_floating_point:
        raise bad_type("attention_mask", "bool or a floating dtype", mask.dtype, "Use bool, or an additive mask")
    hidden = hides(mask)
    hidden = hidden & ~hidden.all(-1, keepdim=True)  # else see `leveled`
    total = (mask if bias is None else mask + bias).masked_fill(hidden, -torch.inf)
    return total if total.dtype in (dtype, torch.float32) else total.to(dtype)


def weights_are_collected(module: nn.Module) -> bool:
    """Whether transformers records weights without saying so in the call, as version 5 does."""
    if getattr(getattr(module, "config", None), "output_attentions", False):
        return True
    capturing = sys.modules.get("transformers.utils.output_capturing")
    if capturing is None:
        return False
    return any("attentions" in key for key in capturing._active_collector.get() or ())
