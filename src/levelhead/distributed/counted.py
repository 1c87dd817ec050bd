"""How many keys each row should see, from the options alone, and the check that it saw them.

The kernel counts the visible keys of each row; this counts what positions, lengths, segments and a mask leave visible.
So a shard that is missing, used twice or at a wrong position is an error, not a wrong result.
"""

from __future__ import annotations

import numpy as np
import torch

from levelhead.call.arrays import Array
from levelhead.call.options import BATCH, FLAG, INTEGER, Scoring, fields
from levelhead.call.segments import positions
from levelhead.distributed.local import QueryRows

_ROWS = 256  # of a mask counted at once: bounds memory


def keys_left(rows: QueryRows, keys: int) -> Array:
    """Keys visible to each row by position and segment, (B, T): the n of the "log-n" rule."""
    low, high = _reach(rows, keys)
    if rows.ids is None:
        visible: Array = np.maximum(high - low + 1, 0)
        return visible
    counts = np.empty_like(low)
    for b, (ids, key_ids) in enumerate(zip(*rows.ids, strict=True)):
        names, index = np.unique(key_ids, return_inverse=True)
        tokens = np.sort(index * (keys + 1) + np.arange(keys))  # by id, then by position
        at = np.searchsorted(names, ids)
        known = np.append(names, 0)[at] == ids
        known &= at < len(names)
        first = np.searchsorted(tokens, at * (keys + 1) + np.clip(low[b], 0, keys))
        last = np.searchsorted(tokens, at * (keys + 1) + np.clip(high[b] + 1, 0, keys))
        counts[b] = np.where(known, np.maximum(last - first, 0), 0)
    return counts


def keys_seen(rows: QueryRows, keys: int) -> Array:
    """Keys visible to each row, (B, 1 or H, T): `keys_left` with the mask."""
    if rows.mask is None:
        return keys_left(rows, keys)[:, None]
    low, high = _reach(rows, keys)
    batch, T, B = rows.q.shape[:-3], rows.q.shape[-2], len(low)
    heads = rows.mask.shape[-3] if rows.mask.dim() > 2 else 1
    mask = rows.mask.detach().expand((*batch, heads, T, keys))
    counts = np.zeros((B, heads, T), np.int64)
    j = torch.arange(keys)
    for b, index in enumerate(np.ndindex(*batch)):
        for t in range(0, T, _ROWS):
            part = slice(t, min(t + _ROWS, T))
            rows_mask = mask[index][:, part]
            visible = rows_mask if mask.dtype is torch.bool else rows_mask != -torch.inf
            visible = visible & (j >= torch.from_numpy(low[b, part])[:, None])
            visible &= j <= torch.from_numpy(high[b, part])[:, None]
            if rows.ids is not None:
                query_ids, key_ids = (torch.from_numpy(np.array(x[b])) for x in rows.ids)
                visible &= query_ids[part, None] == key_ids
            counts[b, :, part] = visible.sum(-1).numpy()
    return counts


def _reach(rows: QueryRows, keys: int) -> tuple[Array, Array]:
    """The first and the last position that each row may see, (B, T) each."""
    present = {name: rows.options[name] for name in fields(FLAG, INTEGER, BATCH) if name in rows.options}
    first, last = Scoring(rows.scale, **present).reach(positions(rows.runs))
    return np.maximum(first, 0), np.minimum(last, keys - 1)


def wrong(counts: Array, rows: QueryRows, keys: int, *, may_overflow: bool) -> str | None:
    """The first row with a wrong number of visible keys, counts (..., H, T); None if all are right.

    Logits that overflow to -inf count as hidden; where that can happen, fewer keys are accepted.
    """
    wanted = keys_seen(rows, keys)
    given = counts.reshape((len(wanted), *counts.shape[-2:]))
    bad = given > wanted if may_overflow else given != wanted
    if not bad.any():
        return None
    b, h, t = np.argwhere(bad)[0].tolist()
    position = int(positions(rows.runs)[t] + rows.options["query_start"][b])
    expected = int(np.broadcast_to(wanted, given.shape)[b, h, t])
    return f"{given[b, h, t]} instead of {expected} for the query at {position} (head {h})"
