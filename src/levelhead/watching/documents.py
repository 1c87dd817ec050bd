"""Which query rows of a call count, and which key is the first one of a row's document.

A key that is hidden from every query of its batch row is padding; in self-attention so is the query at its place, and
such rows count in no statistic. The first key of a row is the first key of its document that is no padding. Documents
are segments; without segments a mask says where one ends: no query before that place sees a key after it, nor the
reverse. A window does not end a document, because neighbours still see each other. Only what hides is read here,
never a logit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from levelhead.torch.masks import hides
from levelhead.watching.described import Call
from levelhead.watching.mask_functions import key_range, row_parts, visible

_NO_ID = torch.iinfo(torch.int64).max


class Layout(NamedTuple):
    """Both (B, T); None: all rows count, and the first key of each is key 0."""

    used: Tensor | None
    first: Tensor | None  # -1: it has none


def layout(call: Call, below: Tensor | None, wait: bool = True) -> Layout:
    """`below`: the largest number of an additive mask that hides a key; `wait`: for the device, to say None."""
    (B, _, T, _), S = call.q.shape, call.k.shape[2]
    if B * T * S == 0:
        return Layout(call.rows, None)
    shown = _shown_by_mask(call, below)
    segments = call.scoring.query_segments is not None
    used, first = call.rows, None
    crossed = call.crossed if isinstance(call.crossed, Tensor) else None  # known to the device alone
    of_itself = T + call.appended == S and (crossed is not None or not call.crossed)
    if used is None and shown is not None and of_itself:
        used = shown.keys[:, :T] if crossed is None else shown.keys[:, :T] | crossed
    if segments:
        own = call.scoring.query_segments >= 0  # a negative id is what packing leaves over
        used = own if used is None else used & own
        first = _first_of_segments(call, None if shown is None else shown.keys)
    elif shown is not None and of_itself and call.appended:  # which every query sees: documents are not told apart
        first = shown.keys.view(torch.uint8).argmax(-1)[:, None].expand(-1, T)
    elif shown is not None:
        first = _first_of_documents(shown) if of_itself else _first_of_rows(shown, T)
        if crossed is not None and of_itself:
            first = torch.where(crossed, _first_of_rows(shown, T), first)
    if call.gone:  # key 0 is not the first one; a row that begins behind it has padding there, and its first key
        zero = torch.zeros((B, T), dtype=torch.int64, device=call.q.device) if first is None else first
        first = zero.masked_fill(zero == 0, -1)
    if wait:  # what is as usual costs nothing
        used = None if used is None or bool(used.all()) else used
        first = None if first is None or not bool(first.any()) else first
    return Layout(used, first)


class _Shown(NamedTuple):
    """What a mask leaves visible to any head."""

    keys: Tensor  # (B, S) bool: to some query
    lowest: Tensor  # (B, T): the first key that a query sees; S: none
    highest: Tensor  # (B, T); -1: none


def _shown_by_mask(call: Call, below: Tensor | None) -> _Shown | None:
    """None: there is no mask."""
    (B, _, T, _), S = call.q.shape, call.k.shape[2]
    mask = call.scoring.mask
    if mask is None and call.mask_mod is None:
        return None
    device = call.q.device
    keys = torch.zeros((B, S), dtype=torch.bool, device=device)
    lowest = torch.full((B, T), S, device=device)
    highest = torch.full((B, T), -1, device=device)
    for batch, rows, start, shown in _shown(call, below):
        shown = shown.any(1)
        end = start + shown.shape[-1]
        keys[batch, start:end] |= shown.any(1)
        if end > start:
            some = shown.any(-1)
            low = start + shown.view(torch.uint8).argmax(-1)
            high = end - 1 - shown.flip(-1).view(torch.uint8).argmax(-1)
            lowest[batch, rows], highest[batch, rows] = low.masked_fill(~some, S), high.masked_fill(~some, -1)
    return _Shown(keys, lowest, highest)


def _shown(call: Call, below: Tensor | None) -> Iterator[tuple[slice, slice, int, Tensor]]:
    """What the mask shows in parts: batch rows, rows, the first key, and (B or 1, H or 1, rows or 1, keys)."""
    (B, _, T, _), S = call.q.shape, call.k.shape[2]
    mask = call.scoring.mask
    if mask is not None:
        mask = mask.reshape(*(1,) * (4 - mask.dim()), *mask.shape)
        for d in range(3):
            mask = mask.narrow(d, 0, 1) if mask.stride(d) == 0 else mask
        mask = mask.expand(-1, -1, -1, S)
    if call.mask_mod is not None:
        for b in range(B):
            yield from _shown_by_function(
                call, b, None if mask is None else mask[b : b + 1] if len(mask) > 1 else mask, below
            )
    elif mask is not None and mask.shape[2] == 1:
        yield slice(0, B), slice(0, T), 0, _not_hidden(mask, below)
    elif mask is not None:
        for here in row_parts(None, T, S * mask.shape[0] * mask.shape[1]):
            yield slice(0, B), here, 0, _not_hidden(mask[:, :, here], below)


def _shown_by_function(
    call: Call, b: int, mask: Tensor | None, below: Tensor | None
) -> Iterator[tuple[slice, slice, int, Tensor]]:
    (_, H, T, _), S, device = call.q.shape, call.k.shape[2], call.q.device
    for here in row_parts(call.mask_mod, T, S):
        index = torch.arange(here.start, here.stop, device=device)
        low, high = key_range(call.mask_mod, b, index, S)
        batch = torch.full((1,), b, device=device)  # `tensor` would copy from the host, and wait
        shown = visible(call.mask_mod, batch, H, index, torch.arange(low, high, device=device))
        shown = shown.narrow(1, 0, 1) if shown.stride(1) == 0 else shown
        if mask is not None:
            part = mask[:, :, here] if mask.shape[2] > 1 else mask
            shown = shown & _not_hidden(part[..., low:high], below)
        yield slice(b, b + 1), here, low, shown


def _not_hidden(mask: Tensor, below: Tensor | None) -> Tensor:
    if mask.dtype is torch.bool:
        return mask
    return ~hides(mask, below)


# ---- first keys


def _first_of_documents(shown: _Shown) -> Tensor:
    """Of self-attention, by where documents end."""
    T = shown.lowest.shape[1]
    t = torch.arange(T, device=shown.lowest.device)
    from_here = shown.lowest.flip(-1).cummin(-1).values.flip(-1)
    until_here = shown.highest.cummax(-1).values
    begins = from_here >= t
    begins[:, 1:] &= until_here[:, :-1] < t[1:]
    document = begins.long().cumsum(-1) - 1
    document = document.clamp(min=0)  # where row 0 sees nothing before it, it begins one
    first = torch.full_like(shown.lowest, T).scatter_reduce(-1, document, shown.lowest, "amin")
    first = first.gather(-1, document)
    return first.masked_fill(first == T, -1)


def _first_of_rows(shown: _Shown, T: int) -> Tensor:
    """Of a call with other keys than queries: a cache, or another sequence. Keys that all batch rows hide at their
    beginning are outside of a window rather than padding: some batch row is the longest."""
    S = shown.keys.shape[1]
    low = shown.keys.view(torch.uint8).argmax(-1).masked_fill(~shown.keys.any(-1), S)
    first = torch.where(low == low.amin(), 0, low)
    return first.masked_fill(low == S, -1)[:, None].expand(-1, T)


def _first_of_segments(call: Call, shown: Tensor | None) -> Tensor:
    """The lowest key of each query's segment."""
    ids = call.scoring.key_segments
    S = ids.shape[1]
    padding = torch.zeros_like(ids, dtype=torch.bool) if shown is None else ~shown
    if call.scoring.key_lengths is not None:
        padding = padding | (torch.arange(S, device=ids.device) >= call.scoring.key_lengths[:, None].to(ids.device))
    ids = ids.masked_fill(padding, _NO_ID).contiguous()
    ordered, order = ids.sort(stable=True, dim=-1)
    wanted = call.scoring.query_segments.contiguous()
    at = torch.searchsorted(ordered, wanted).clamp(max=S - 1)
    found = ordered.gather(-1, at) == wanted
    first: Tensor = order.gather(-1, at).masked_fill(~found, -1)
    return first
