"""Nested tensors of PyTorch's jagged layout: sequences of different lengths, stored one after another.

Their values are one packed sequence, and attention stays within a segment. The core skips what lies between segments,
so nothing is padded. Which calls this covers is decided by `is_served`; `sdpa` says what happens to the others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def is_nested(x: Any) -> bool:
    """Asks no other subclass: its rule for functions must not see a question that PyTorch's function does not ask."""
    kind = type(x)
    return kind.__name__ == "NestedTensor" or (kind in (Tensor, nn.Parameter) and x.is_nested)


def is_served(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any, is_causal: bool) -> bool:
    """Whether a call is one of packed sequences: (B, H, lengths, D), jagged, without holes and without a mask."""
    if attn_mask is not None or not all(is_nested(x) and x.layout is torch.jagged and x.dim() == 4 for x in (q, k, v)):
        return False
    if any(x._ragged_idx != 2 or x.lengths() is not None for x in (q, k, v)):  # type: ignore[attr-defined]
        return False
    same_heads = q.shape[1] == k.shape[1] == v.shape[1]
    # From the first query of each sequence on: positions in the packed sequence say that if both lengths agree.
    return same_heads and k.shape[2] == v.shape[2] and (not is_causal or q.shape[2] == k.shape[2])


def packed(x: Tensor) -> Tensor:
    """(1, H, tokens of all sequences, D)."""
    values: Tensor = x.transpose(1, 2).values()  # (tokens, H, D)
    return values.transpose(0, 1)[None]


def segments(x: Tensor) -> Tensor:
    """(1, tokens): which sequence each token belongs to."""
    lengths = x.offsets().diff()  # type: ignore[attr-defined]
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)[None]


def unpacked(out: Tensor, like: Tensor) -> Tensor:
    """A packed output with the lengths of `like`."""
    values = out[0].transpose(0, 1).contiguous()
    rows: Tensor = torch.nested.nested_tensor_from_jagged(values, like.offsets())  # type: ignore[attr-defined]
    return rows.transpose(1, 2)
