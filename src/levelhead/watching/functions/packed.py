"""Packed sequences, as variable-length kernels take them: tokens of all sequences in a row, and cumulative lengths.

Where the queries and keys of each sequence are equally many, segments describe the call as it is. Else positions differ
between the sequences, and each becomes a batch row of its own, with lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from levelhead.watching.measure import Call, call_of


def segments(cu: Tensor, total: int) -> Tensor:
    """The sequence of each token (1, total); tokens after the last one get the next number."""
    ends = cu[1:].contiguous()
    return torch.searchsorted(ends, torch.arange(total, device=cu.device, dtype=ends.dtype), right=True)[None]


def lengths(cu: Tensor) -> Tensor:
    return cu.diff().long()


def call(
    q: Tensor,
    k: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    scale: float,
    *,
    used_q: Tensor | None = None,
    used_k: Tensor | None = None,
    bottom_right: bool = True,
    **fields: Any,
) -> Call:
    """The call of q (tokens, H, D) and k (tokens, G, D). `used_q`, `used_k`: how many tokens of each sequence count.
    `bottom_right`: the last query of a sequence sits at its last key; else the first at the first."""
    if used_q is None and used_k is None and _same(cu_q, cu_k):
        q4, k4 = (x.transpose(0, 1)[None] for x in (q, k))
        ids = segments(cu_q, q.shape[0]), segments(cu_k, k.shape[0])
        whole = call_of(q4, k4, scale, query_segments=ids[0], key_segments=ids[1], **fields)
        if torch.compiler.is_compiling() or int(cu_q[-1]) == q.shape[0]:
            return whole
        return replace(whole, rows=ids[0] < len(cu_q) - 1)
    n_q = lengths(cu_q) if used_q is None else used_q.long()
    n_k = lengths(cu_k) if used_k is None else used_k.long()
    return in_rows(padded(q, cu_q, n_q), padded(k, cu_k, n_k), n_q, n_k, scale, bottom_right=bottom_right, **fields)


def in_rows(
    q: Tensor, k: Tensor, n_q: Tensor | None, n_k: Tensor, scale: float, *, bottom_right: bool = True, **fields: Any
) -> Call:
    """The call of q (B, H, T, D) and k (B, G, S, D), of which each batch row has so many queries and keys."""
    n = q.shape[2] if n_q is None else n_q
    start = n_k - n if bottom_right else torch.zeros_like(n_k)
    return call_of(q, k, scale, query_lengths=n_q, key_lengths=n_k, query_start=start, **fields)


def padded(x: Tensor, cu: Tensor, n: Tensor) -> Tensor:
    """Packed tokens (tokens, H, D) as (sequences, H, longest, D)."""
    places = torch.arange(max(int(n.max()) if len(n) else 0, 1), device=x.device)
    index = (cu[:-1].long()[:, None] + places).clamp(max=max(x.shape[0] - 1, 0))
    return x[index].transpose(1, 2)


def needs_rows(cu_q: Any, cu_k: Any, *others: Any) -> bool:
    """Whether a call becomes batch rows, whose sizes depend on numbers: not inside a compiled graph."""
    return any(x is not None for x in others) or cu_q is not cu_k


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (not torch.compiler.is_compiling() and torch.equal(a, b))


def from_pages(pages: Tensor, table: Tensor) -> Tensor:
    """A paged cache (pages, size, G, D) by the table (B, pages of a row) as (B, G, S, D)."""
    return pages[table.long().clamp(min=0)].flatten(1, 2).transpose(1, 2)


def per_row_alibi(slopes: Tensor, start: Tensor | int) -> Callable[..., Tensor]:
    """A score function for ALiBi slopes (B, H) that differ between batch rows."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        first = start[b] if isinstance(start, Tensor) else start
        return score - slopes[b, h] * (q + first - k).abs()

    return score_mod
