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
from levelhead.watching.mask_functions import visible

_AT_A_TIME = 1 << 22  # entries of a mask that are read at a time
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
    seen = _seen(call, below)
    segments = call.scoring.query_segments is not None
    used, first = call.rows, None
    if used is None and seen is not None and T == S and not call.crossed:
        used = seen.keys
    if segments:
        own = call.scoring.query_segments >= 0  # a negative id is what packing leaves over
        used = own if used is None else used & own
        first = _first_of_segments(call, None if seen is None else seen.keys)
    elif seen is not None:
        first = _first_of_documents(seen) if T == S and not call.crossed else _first_of_rows(seen, T)
    if wait:  # what is as usual costs nothing
        used = None if used is None or bool(used.all()) else used
        first = None if first is None or not bool(first.any()) else first
    return Layout(used, first)


class _Seen(NamedTuple):
    """What a mask leaves visible to any head."""

    keys: Tensor  # (B, S) bool: to some query
    lowest: Tensor  # (B, T): the first key that a query sees; S: none
    highest: Tensor  # (B, T); -1: none


def _seen(call: Call, below: Tensor | None) -> _Seen | None:
    """None: there is no mask."""
    (B, _, T, _), S = call.q.shape, call.k.shape[2]
    mask = call.scoring.mask
    if mask is None and call.mask_mod is None:
        return None
    device = call.q.device
    keys = torch.zeros((B, S), dtype=torch.bool, device=device)
    lowest, highest = (torch.zeros((B, T), dtype=torch.int64, device=device) for _ in range(2))
    for rows, shown in _shown(call, below):
        shown = shown.any(1).expand(B, -1, -1)
        keys |= shown.any(1)
        some = shown.any(-1)
        low = shown.view(torch.uint8).argmax(-1).masked_fill(~some, S)
        high = (S - 1 - shown.flip(-1).view(torch.uint8).argmax(-1)).masked_fill(~some, -1)
        lowest[:, rows], highest[:, rows] = low, high
    return _Seen(keys, lowest, highest)


def _shown(call: Call, below: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """What the mask shows of some rows at a time, (B or 1, H or 1, rows or 1, S)."""
    (B, H, T, _), S = call.q.shape, call.k.shape[2]
    mask = call.scoring.mask
    if mask is not None:
        mask = mask.reshape(*(1,) * (4 - mask.dim()), *mask.shape)
        for d in range(2):
            mask = mask.narrow(d, 0, 1) if mask.stride(d) == 0 else mask
        mask = mask.expand(-1, -1, -1, S)
    stretched = call.mask_mod is None and mask is not None and (mask.shape[2] == 1 or mask.stride(2) == 0)
    if stretched and mask is not None:
        yield slice(0, T), _not_hidden(mask[:, :, :1], below)
        return
    per_row = S * max(B, 1 if mask is None else mask.shape[0] * mask.shape[1])
    step = max(1, _AT_A_TIME // per_row)
    device = call.q.device
    for start in range(0, T, step):
        rows = slice(start, min(start + step, T))
        shown = None
        if mask is not None:
            shown = _not_hidden(mask[:, :, rows] if mask.shape[2] > 1 else mask, below)
        if call.mask_mod is not None:
            b, i, j = (torch.arange(*r, device=device) for r in ((0, B), (rows.start, rows.stop), (0, S)))
            mod = visible(call.mask_mod, b, H, i, j)
            mod = mod.narrow(1, 0, 1) if mod.stride(1) == 0 else mod
            shown = mod if shown is None else mod & shown
        assert shown is not None
        yield rows, shown


def _not_hidden(mask: Tensor, below: Tensor | None) -> Tensor:
    if mask.dtype is torch.bool:
        return mask
    hidden = hides(mask)
    return ~hidden if below is None else ~(hidden | (mask <= below))


# ---- first keys


def _first_of_documents(seen: _Seen) -> Tensor:
    """Of self-attention, by where documents end."""
    T = seen.lowest.shape[1]
    t = torch.arange(T, device=seen.lowest.device)
    from_here = seen.lowest.flip(-1).cummin(-1).values.flip(-1)
    until_here = seen.highest.cummax(-1).values
    begins = from_here >= t
    begins[:, 1:] &= until_here[:, :-1] < t[1:]
    document = begins.long().cumsum(-1) - 1
    document = document.clamp(min=0)  # where row 0 sees nothing before it, it begins one
    first = torch.full_like(seen.lowest, T).scatter_reduce(-1, document, seen.lowest, "amin")
    first = first.gather(-1, document)
    return first.masked_fill(first == T, -1)


def _first_of_rows(seen: _Seen, T: int) -> Tensor:
    """Of a call with other keys than queries: a cache, or another sequence. Keys that all batch rows hide at their
    beginning are outside of a window rather than padding: some batch row is the longest."""
    S = seen.keys.shape[1]
    low = seen.keys.view(torch.uint8).argmax(-1).masked_fill(~seen.keys.any(-1), S)
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
