"""How many keys each row should have seen, from the options alone; and the check that it did.

The kernel counts the keys it showed to a row; this counts what positions, lengths, segments and a
mask leave. A shard left out, taken twice or put in a wrong place is thus an error, not an answer.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from levelhead.call.arrays import Array
from levelhead.call.options import BATCH, FLAG, INTEGER, Scoring, fields
from levelhead.distributed.local import Rows
from levelhead.distributed.split import positions

_ROWS = 256  # of a mask looked at together: bounds memory


def keys_left(rows: Rows, keys: int) -> Array:
    """Keys left to each row by position and segment, (B, T): the n of the "log-n" rule."""
    low, high = _reach(rows, keys)
    if rows.query_ids is None or rows.key_ids is None:
        free: Array = np.maximum(high - low + 1, 0)
        return free
    found = np.empty_like(low)
    for b, (ids, key_ids) in enumerate(zip(rows.query_ids, rows.key_ids, strict=True)):
        names, place = np.unique(key_ids, return_inverse=True)
        tokens = np.sort(place * (keys + 1) + np.arange(keys))  # by id, then by position
        at = np.searchsorted(names, ids)
        known = np.append(names, 0)[at] == ids
        known &= at < len(names)
        first = np.searchsorted(tokens, at * (keys + 1) + np.clip(low[b], 0, keys))
        last = np.searchsorted(tokens, at * (keys + 1) + np.clip(high[b] + 1, 0, keys))
        found[b] = np.where(known, np.maximum(last - first, 0), 0)
    return found


def keys_seen(rows: Rows, keys: int) -> Array:
    """Keys each row sees, (B, 1 or H, T): the above, and what the mask leaves of it."""
    if rows.mask is None:
        return keys_left(rows, keys)[:, None]
    low, high = _reach(rows, keys)
    batch, T, B = rows.q.shape[:-3], rows.q.shape[-2], len(low)
    heads = rows.mask.shape[-3] if rows.mask.dim() > 2 else 1
    mask = rows.mask.detach().expand((*batch, heads, T, keys))
    found = np.zeros((B, heads, T), np.int64)
    j = torch.arange(keys)
    for b, place in enumerate(np.ndindex(*batch)):
        for t in range(0, T, _ROWS):
            part = slice(t, min(t + _ROWS, T))
            seen = _sees(mask[place][:, part])
            seen = seen & (j >= torch.from_numpy(low[b, part])[:, None])
            seen &= j <= torch.from_numpy(high[b, part])[:, None]
            if rows.query_ids is not None and rows.key_ids is not None:
                ids = (torch.from_numpy(np.array(x)) for x in (rows.query_ids[b], rows.key_ids[b]))
                own, others = ids
                seen &= own[part, None] == others
            found[b, :, part] = seen.sum(-1).numpy()
    return found


def _reach(rows: Rows, keys: int) -> tuple[Array, Array]:
    """The first and the last position that each row may see, (B, T) each."""
    present = {name: rows.options[name] for name in fields(FLAG, INTEGER, BATCH) if name in rows.options}
    first, last = Scoring(rows.scale, **present).reach(positions(rows.runs))
    return np.maximum(first, 0), np.minimum(last, keys - 1)


def _sees(mask: Tensor) -> Tensor:
    return mask if mask.dtype is torch.bool else mask != -torch.inf


def wrong(counts: Array, rows: Rows, keys: int, *, may_overflow: bool) -> str | None:
    """What is wrong with the keys that rows saw, (..., H, T); None: nothing.

    Logits that overflow to -inf count as hidden; where some may, a row may have seen fewer.
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
