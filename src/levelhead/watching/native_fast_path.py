"""The native fast path of `nn.TransformerEncoderLayer` and `nn.MultiheadAttention`, observed beside it.

In evaluation without gradients these modules call one fused operator each, on nested tensors where there is padding.
The operator runs as it would without a watch; its queries and keys are computed once more and measured. The layer takes
this path only if no module in it has hooks, so those of a watch are not counted (`uncounted_hooks`). While
`torch.compile` traces, the path is off: what runs then is observed in the graph, and differs by rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from levelhead.call import scaling
from levelhead.torch.swap import Function
from levelhead.watching.described import Call, call_of
from levelhead.watching.module_stack import ATTRIBUTE, Frame, current
from levelhead.watching.undisturbed import undisturbed

PATH = "torch's native fast path"
NUMBERS = "torch's native fast path takes its mask of numbers for a boolean one: every number but 0 hides its key"


# ---- torch's functions


def instead() -> dict[Function, Function]:
    """By function of torch, what takes its place."""
    layer, attention = torch._transformer_encoder_layer_fwd, torch._native_multi_head_attention
    enabled = torch.backends.mha.get_fastpath_enabled
    return {layer: layer_over(layer), attention: attention_over(attention), enabled: is_enabled_over(enabled)}


def is_enabled_over(original: Function) -> Function:
    """Over `torch.backends.mha.get_fastpath_enabled`."""

    def get_fastpath_enabled() -> bool:
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return True
        traced = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
        return False if traced else bool(original())

    return get_fastpath_enabled


def layer_over(original: Function) -> Function:
    """Over `torch._transformer_encoder_layer_fwd`."""

    def _transformer_encoder_layer_fwd(src: Tensor, *rest: Any) -> Any:
        def describe() -> Call:
            _, heads, weight, bias = rest[:4]
            norm_first, eps, norm_weight, norm_bias, mask, mask_type = *rest[7:11], *rest[17:19]
            x = _padded(src)
            x = functional.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, eps) if norm_first else x
            return _described(frame, x, src, heads, weight, bias, mask, mask_type)

        frame = current()
        inner = None if frame is None else getattr(getattr(frame.watched.module, "self_attn", None), ATTRIBUTE, None)
        if inner is not None and frame is not None:
            inner.runs += 1
            frame = Frame(inner)
        return _run(frame, lambda: original(src, *rest), describe)

    return _transformer_encoder_layer_fwd


def attention_over(original: Function) -> Function:
    """Over `torch._native_multi_head_attention`, with which queries, keys and values are projections of one tensor."""

    def _native_multi_head_attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
        def describe() -> Call:
            _, heads, weight, bias, _, _, mask, _, _, mask_type = rest[:10]
            return _described(frame, _padded(query), query, heads, weight, bias, mask, mask_type)

        frame = current()
        return _run(frame, lambda: original(query, key, value, *rest), describe)

    return _native_multi_head_attention


def _run(frame: Frame | None, run: Callable[[], Any], describe: Callable[[], Call]) -> Any:
    if frame is None or frame.busy or torch.compiler.is_compiling() or not frame.watch.wanted():
        return run()
    frame.busy = True
    try:
        result = run()
        with undisturbed():
            frame.watch.record_call(frame, PATH, describe())
    finally:
        frame.busy = False
    return result


# ---- what they compute


def _padded(x: Tensor) -> Tensor:
    return x.to_padded_tensor(0.0) if x.is_nested else x


def _described(
    frame: Frame | None,
    x: Tensor,
    given: Tensor,
    heads: int,
    weight: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    mask_type: int | None,
) -> Call:
    """The call of these tokens (B, T, width); `given`: the same, perhaps nested."""
    width = weight.shape[0] // 3
    both = functional.linear(x, weight[: 2 * width], bias[: 2 * width])
    q, k = both.reshape(*x.shape[:2], 2, heads, -1).permute(2, 0, 3, 1, 4)
    visible = rows = None
    if given.is_nested:
        lengths = given._nested_tensor_size()[:, 0].to(x.device)
        rows = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
        visible = rows[:, None, None]
    elif mask is not None:
        hidden = mask.to(torch.bool)  # as the operator does
        if frame is not None and mask.is_floating_point() and bool((hidden & (mask > -math.inf)).any()):
            frame.watched.not_observed[NUMBERS] = None
        visible = ~(hidden[:, None, None] if mask_type == 1 else hidden)
    call = call_of(q, k, scaling.usual(q.shape[3]), mask=visible)
    return call if rows is None else Call(call.q, call.k, call.scoring, rows=rows)
