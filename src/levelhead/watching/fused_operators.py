"""torch's fused attention operators, as a dispatch mode sees them.

Code that keeps `F.scaled_dot_product_attention` from before the watch, an exported or a scripted module end in one of
these, although no wrapper was called.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from levelhead.call.scaling import usual
from levelhead.watching.measure import Call, call_of

PATH = "sdpa, below Python"

# The places of is_causal and of the mask among the arguments; None: it has no mask, "attn_mask": passed by that name.
_OPERATORS: dict[str, tuple[int, int | str | None]] = {
    "_scaled_dot_product_flash_attention_for_cpu": (4, "attn_mask"),
    "_scaled_dot_product_flash_attention": (4, None),
    "_scaled_dot_product_efficient_attention": (6, 3),
    "_scaled_dot_product_cudnn_attention": (6, 3),
    "_scaled_dot_product_fused_attention_overrideable": (5, 3),
}


def described(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """The call of an operator; None: it is another operator."""
    if name not in _OPERATORS:
        return None
    causal_at, mask_at = _OPERATORS[name]
    q, k = args[0], args[1]
    scale = kwargs.get("scale")
    causal = bool(args[causal_at]) if len(args) > causal_at else bool(kwargs.get("is_causal", False))
    mask: Tensor | None = None
    if isinstance(mask_at, int):
        mask = args[mask_at] if len(args) > mask_at else kwargs.get("attn_bias")
    elif mask_at is not None:
        mask = kwargs.get(mask_at)
    # This one aligns its causal mask with the last key.
    start = k.shape[2] - q.shape[2] if causal and name == "_scaled_dot_product_flash_attention" else None
    return call_of(q, k, usual(q.shape[3]) if scale is None else scale, start, mask=mask, causal=causal)
