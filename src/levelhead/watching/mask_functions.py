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

# Entries of a mask that is made at a time.
AT_A_TIME = 1 << 22


def visible(mask_mod: Any, batch: Tensor, heads: int, rows: Tensor, keys: Tensor) -> Tensor:
    """Which of the keys (S,) the queries, (T,) or (B, T), of these batch rows (B,) see, (B, H, T, S). `mask_mod` is a
    function of (b, h, q, k), or a `BlockMask`."""
    function = getattr(mask_mod, "mask_mod", mask_mod)
    shown: Tensor = _mapped(function, rows)(batch, torch.arange(heads, device=rows.device), rows, keys)
    if function is mask_mod:
        return shown
    partial, full = (_blocks(*part, batch, rows, keys) for part in _parts(mask_mod))
    if partial is not None:
        shown = shown & partial
    return shown if full is None else shown | full


def scored(score_mod: Callable[..., Any], logits: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """The logits (B, H, T, S) of these queries, (T,) or (B, T), and keys after a function of (score, b, h, q, k)."""
    b, h = (torch.arange(n, device=rows.device) for n in logits.shape[:2])
    changed: Tensor = _mapped(score_mod, rows, 0)(logits, b, h, rows, keys)
    return changed.to(logits.dtype)


def key_range(mask_mod: Any, batch: int, rows: Tensor, S: int) -> tuple[int, int]:
    """From which key to which the blocks of a `BlockMask` let these queries of a batch row see anything; of a function
    alone: all of the S keys."""
    if not hasattr(mask_mod, "kv_indices"):
        return 0, S
    size = mask_mod.BLOCK_SIZE[1]
    low, high = S, 0
    for _, counts, indices in _parts(mask_mod):
        if counts is None or indices is None:
            continue
        b = min(batch, counts.shape[0] - 1)
        at = torch.unique(rows // mask_mod.BLOCK_SIZE[0])
        counts, indices = counts[b].index_select(1, at), indices[b].index_select(1, at)
        listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
        if bool(listed.any()):
            low = min(low, int(indices[listed].min()) * size)
            high = max(high, (int(indices[listed].max()) + 1) * size)
    return min(low, high), min(high, S)


def row_parts(mask_mod: Any, rows: int, S: int) -> list[slice]:
    """The indices of so many rows in parts, small enough for a mask of S keys; under a `BlockMask` a few blocks each,
    because the keys that rows see differ from block to block."""
    step = max(1, AT_A_TIME // max(S, 1))
    if hasattr(mask_mod, "kv_indices"):
        step = min(step, max(mask_mod.BLOCK_SIZE[0], 256))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _mapped(function: Callable[..., Any], rows: Tensor, *first: int) -> Callable[..., Any]:
    """`function` over all of its indices, where each batch row may have rows of its own; `first`: dimensions of
    arguments before them."""
    for place in (3, 2, 1, 0):
        along = {place} | ({2} if place == 0 and rows.dim() == 2 else set())
        function = torch.vmap(function, in_dims=(*first, *(0 if i in along else None for i in range(4))))

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


def _parts(mask: Any) -> tuple[tuple[Any, Tensor | None, Tensor | None], ...]:
    """Block size, number and places of the blocks where the function counts, and of those that are visible as a
    whole; both may be absent."""
    counts, full = (mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)
    return (mask.BLOCK_SIZE, *counts), (mask.BLOCK_SIZE, *full)


def _blocks(
    size: Any, counts: Tensor | None, places: Tensor | None, batch: Tensor, rows: Tensor, keys: Tensor
) -> Tensor | None:
    """Whether each pair lies in one of these blocks, (B or 1, H or 1, T, S)."""
    if counts is None or places is None:
        return None
    at_row, at_key = rows // size[0], keys // size[1]
    if counts.shape[0] > 1:
        counts, places = (x.index_select(0, batch) for x in (counts, places))
    if rows.dim() == 1:
        counts, places = (x.index_select(2, at_row) for x in (counts, places))
    else:
        at_head = torch.arange(counts.shape[1], device=rows.device)[:, None]
        at_batch = torch.arange(len(counts), device=rows.device)[:, None, None]
        counts, places = (x[at_batch, at_head, at_row[:, None]] for x in (counts, places))
    listed = torch.arange(places.shape[-1], device=places.device) < counts[..., None]
    beyond = int(at_key.max()) + 1 if len(keys) else 0  # blocks of other keys are of no interest
    found = torch.zeros((*counts.shape, beyond + 1), dtype=torch.bool, device=places.device)
    found.scatter_(-1, places.long().masked_fill(~listed, beyond).clamp(max=beyond), True)
    return found.index_select(-1, at_key)
