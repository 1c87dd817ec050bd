"""Masks and scores that a model gives as functions, as `flex_attention` takes them, evaluated for some rows and keys.

A function is called for single indices, mapped over the others by `torch.vmap`. What it does not depend on costs
nothing: those dimensions of the result have stride 0. A `BlockMask` also says which blocks of keys a block of queries
sees at all, and in which of them its function does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor


def visible(mask_mod: Any, heads: tuple[int, int], rows: Tensor, keys: Tensor) -> Tensor:
    """Which of the keys (S,) the queries (T,) see, (B, H, T, S) for `heads` = (B, H). `mask_mod` is a function of
    (b, h, q, k), or a `BlockMask`."""
    function = getattr(mask_mod, "mask_mod", mask_mod)
    shown: Tensor = _mapped(function)(*_indices(heads, rows, keys))
    if function is mask_mod:
        return shown
    partial, full = _blocks(mask_mod, rows, keys)
    shown = shown & partial
    return shown if full is None else shown | full


def scored(score_mod: Callable[..., Any], logits: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """The logits (B, H, T, S) of these queries and keys after a function of (score, b, h, q, k)."""
    heads = (logits.shape[0], logits.shape[1])
    changed: Tensor = _mapped(score_mod, 0)(logits, *_indices(heads, rows, keys))
    return changed.to(logits.dtype)


def _indices(heads: tuple[int, int], rows: Tensor, keys: Tensor) -> tuple[Tensor, ...]:
    b, h = (torch.arange(n, device=rows.device) for n in heads)
    return b, h, rows, keys


def _mapped(function: Callable[..., Any], *first: int) -> Callable[..., Any]:
    """`function` over all of its indices; `first`: dimensions of arguments before them."""
    for place in (3, 2, 1, 0):
        function = torch.vmap(function, in_dims=(*first, *(0 if i == place else None for i in range(4))))

    def mapped(*arguments: Tensor) -> Any:
        with _indexing():
            return function(*arguments)

    return mapped


def _indexing() -> Any:
    """Lets such functions index tensors with single indices, as torch's own evaluation does."""
    try:
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    except ImportError:  # before torch 2.6
        return nullcontext()
    return TransformGetItemToIndex()


def _blocks(mask: Any, rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor | None]:
    """Whether each pair lies in a block where the function counts, and in one that is visible as a whole,
    (B, H, T, S) each; B and H may be 1."""
    at_row, at_key = (index // size for index, size in zip((rows, keys), mask.BLOCK_SIZE, strict=True))

    def spread(counts: Tensor, indices: Tensor) -> Tensor:
        counts, indices = (x.index_select(2, at_row) for x in (counts, indices))
        listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
        size = int(at_key.max()) + 2 if len(at_key) else 1
        found = torch.zeros((*counts.shape, size), dtype=torch.bool, device=indices.device)
        found.scatter_(-1, indices.long().clamp(max=size - 1).masked_fill(~listed, size - 1), True)
        return found.index_select(-1, at_key)

    full = None if mask.full_kv_num_blocks is None else spread(mask.full_kv_num_blocks, mask.full_kv_indices)
    return spread(mask.kv_num_blocks, mask.kv_indices), full
