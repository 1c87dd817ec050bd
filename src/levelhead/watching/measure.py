"""From the description of a call to the tally of its heads.

On the CPU the core makes one pass that computes statistics only, on CUDA and ROCm the Triton kernel (`device`);
elsewhere plain torch does, some rows at a time. On a device nothing waits for it. All give the same tally. What hides
a key is decided here once for a call: finite numbers that stand in for -inf (`torch.masks`), and masks that are
functions. Modules and steps are unknown here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from levelhead import _core, stats
from levelhead.device.choice import CORE, TORCH, TRITON, choice
from levelhead.runs import tally
from levelhead.state import unwritten
from levelhead.torch.masks import hides, hiding
from levelhead.torch.operators import for_core, memory
from levelhead.watching import mask_functions
from levelhead.watching.described import Call as Call
from levelhead.watching.described import at_rows, wide
from levelhead.watching.described import call_of as call_of
from levelhead.watching.described import from_scores as from_scores
from levelhead.watching.described import plain as plain
from levelhead.watching.documents import Layout, layout
from levelhead.watching.mask_functions import key_range, row_parts, visible
from levelhead.watching.rows_by_torch import Fields, as_fields, joined, rows_by_torch
from levelhead.watching.tallied_by_kernel import hiding_by_kernel, serves, tallied_by_kernel


def tallied(call: Call, *, rows: Tensor | None = None, by_torch: bool | None = None) -> Tensor:
    """The tally (H, columns) of a call, on its device; `rows` (B, R): of these of each batch row, one of each of R
    strata of equal size, as `taken_rows` takes them; `by_torch` forces the path for other devices."""
    with torch.autocast(call.q.device.type, enabled=False):  # statistics must not be rounded
        return _tallied(call, rows, by_torch)


def _tallied(call: Call, rows: Tensor | None, by_torch: bool | None) -> Tensor:
    call = call.detached()
    T = call.q.shape[2]
    path = _path(call, by_torch)
    elsewhere = path != CORE
    below = _hiding(call, wait=not elsewhere, by_kernel=path == TRITON)
    used, first = layout(call, below, wait=not elsewhere)
    index = torch.arange(T, device=call.q.device)
    whole = used = _counted(call, index, used)
    if rows is not None:
        index = rows
        used, first = (None if x is None else at_rows(x, rows) for x in (used, first))
    if path == TRITON and (heads := tallied_by_kernel(call, rows, used, first, below)) is not None:
        fill_squares(heads, call.q, call.k, whole)
        return heads
    part = call if rows is None else call.of_rows(rows)
    if elsewhere or call.score_mod is not None:
        fields = iter([rows_by_torch(_hidden(part, below), index, used, first, T)])
    else:
        fields = _by_core(part, index, below, Layout(used, first))
    return summed(fields, rows, call, whole)


def _path(call: Call, by_torch: bool | None) -> str:
    """Who computes: the core, the Triton kernel, or plain torch."""
    if by_torch is not None:
        return TORCH if by_torch else CORE
    device = call.q.device.type
    chosen = choice(device).path
    if chosen != TRITON or serves(call):
        return chosen
    return CORE if device == "cpu" else TORCH


def from_pass(sums: Any, counts: Any, sinks: Any, call: Call) -> Tensor:
    """The same of a call that levelhead computed, from the states of its rows, (..., H, T, ...) NumPy arrays; measured
    once more where the statistics need what the pass did not have: other first keys, stand-ins for -inf, or the rows as
    they were (`sums` is None)."""
    if sums is None:
        return tallied(call)
    mask = call.scoring.mask
    below = _hiding(call, wait=True)
    used, first = layout(call, below)
    if first is not None or (below is not None and bool((hides(mask, below) & (mask != -math.inf)).any())):
        return tallied(call)
    used = _counted(call, torch.arange(call.q.shape[2]), used)
    return from_core(sums, counts, sinks, call, exists=None if used is None else used[:, None].numpy())


def from_core(
    sums: Any, counts: Any, sinks: Any, call: Call, positions: Tensor | None = None, exists: Any = None
) -> Tensor:
    """The same from the states of a fused pass, (..., H, T, ...) NumPy arrays. `positions`: where the rows sit, if they
    are a part of a sequence. `exists`: rows that count, broadcastable to (B, H, T)."""
    shape = call.q.shape[:3]
    sums, counts = (x.reshape(*shape, x.shape[-1]) for x in (sums, counts))
    used = None if exists is None else torch.from_numpy(np.broadcast_to(exists, shape)[:, 0].copy())
    return summed(
        iter([as_fields(stats.rows(sums, counts, sinks, exists), None if used is None else used[:, None])]),
        positions,
        call,
        used,
    )


def fill_squares(heads: Tensor, q: Tensor, k: Tensor, used: Tensor | None = None) -> None:
    """Sets the sums of q² and k² of all heads of a tally; `used` (B, T): the queries that count."""
    for name, x, kept in (("q", q.detach(), used), ("k", k.detach(), None)):
        squares = torch.linalg.vector_norm(x, dim=-1, dtype=wide(x)).square()  # of rows: no copy of x
        count: Any = x.shape[0] * x.shape[2]
        if kept is not None:
            squares, count = squares.masked_fill(~kept[:, None], 0.0), kept.sum()
        shared = heads.shape[0] // max(x.shape[1], 1)
        heads[:, tally.INDEX[f"{name}_squares"]] = squares.sum((0, 2)).repeat_interleave(shared).to(heads)
        heads[:, tally.INDEX[f"{name}_count"]] = count * x.shape[3]


# ---- what hides a key, and which rows count


def may_be_padded(call: Call) -> bool:
    """Whether rows do not count because keys are hidden from all queries; on a device, which is not waited for, whether
    that is possible."""
    call = call.detached()
    if call.q.shape[2] + call.appended != call.k.shape[2] or call.rows is not None:
        return False
    if call.scoring.mask is None and call.mask_mod is None:
        return False
    on_host = call.q.device.type == "cpu"
    return not on_host or layout(call, _hiding(call, wait=True)).used is not None


def _hiding(call: Call, wait: bool, by_kernel: bool = False) -> Tensor | None:
    """The largest number of the call's mask that hides a key; None: it has no numbers."""
    mask = call.scoring.mask
    if mask is None or mask.dtype is torch.bool:
        return None
    reach = 0.0 if call.ready else _reach(call)
    found = hiding_by_kernel(call, mask, reach) if by_kernel else None
    return hiding(mask, reach, wait=wait) if found is None else found


def _reach(call: Call) -> Tensor:
    """A bound on the logits' distance from 0 before the mask is added: of the largest |q| |k| in a head."""
    scoring = call.scoring
    factor = scoring.scale.abs().max().to(call.q.device)
    if scoring.log_n:
        factor = factor * math.log(max(call.k.shape[2], 2))
    if not scoring.cosine:
        for x in (call.q, call.k):
            norms = torch.linalg.vector_norm(x, dim=-1, dtype=wide(x)).flatten()
            factor = factor * torch.cat([norms[:0].new_zeros(1), torch.where(norms.isfinite(), norms, 0.0)]).max()
    bound: Tensor = scoring.capped(factor)
    return bound


def _hidden(call: Call, below: Tensor | None) -> Call:
    """The call with -inf for every number of its mask that hides."""
    mask = call.scoring.mask
    if mask is None or mask.dtype is torch.bool:
        return call
    hidden = hides(mask, below)
    if mask.dtype not in (call.q.dtype, torch.float32):
        mask = mask.to(wide(call.q))
    return replace(call, scoring=call.scoring._replace(mask=mask.masked_fill(hidden, -math.inf)))


def _counted(call: Call, index: Tensor, used: Tensor | None) -> Tensor | None:
    """Which of the rows at these places in the sequence count, (B, T); None: all."""
    exists: Tensor | None = call.scoring.exists(index)
    if exists is None or used is None:
        return used if exists is None else exists
    return exists & used


# ---- by the core


def _by_core(call: Call, index: Tensor, below: Tensor | None, rows: Layout) -> Iterator[Fields]:
    """In one call, or by batch rows and in parts of these where a mask must be made or changed that is large."""
    mask = call.scoring.mask
    (B, _, T, _), S = call.q.shape, call.k.shape[2]
    small = mask is None or mask.dtype is torch.bool or mask.numel() <= mask_functions.AT_A_TIME
    if B * T * S == 0 or (call.mask_mod is None and small):
        yield _by_core_at_once(replace(_hidden(call, below), mask_mod=None), index, rows)
        return
    heads = 1 if mask is None or mask.dim() < 3 else mask.shape[-3]
    for b in range(B):
        here = Layout(*(None if x is None else x[b : b + 1] for x in rows))
        whole, own = call.of_batch(b), index if index.dim() == 1 else index[b]
        chosen = [torch.arange(x.start, x.stop) for x in row_parts(call.mask_mod, T, S * heads)]
        parts = [_part(whole, b, each, own, below, here) for each in chosen]
        yield joined(parts)


def _part(call: Call, b: int, chosen: Tensor, index: Tensor, below: Tensor | None, rows: Layout) -> Fields:
    """Some rows of batch row b, and of the keys those that a block mask lets them see."""
    part, here = _hidden(call.of_rows(chosen), below), index[chosen]
    used, first = (None if x is None else x[:, chosen] for x in rows)
    if call.mask_mod is None:
        return _by_core_at_once(part, here, Layout(used, first))
    low, high = key_range(call.mask_mod, b, here, call.k.shape[2])
    mask, ids = part.scoring.mask, part.scoring.key_segments
    shown = visible(call.mask_mod, torch.tensor([b]), call.q.shape[1], here, torch.arange(low, high))
    if mask is not None:
        mask = mask[..., low:high] if mask.shape[-1] > 1 else mask
        shown = shown & mask if mask.dtype is torch.bool else torch.where(shown, mask, -math.inf)
    scoring = part.scoring._replace(mask=shown, key_segments=None if ids is None else ids[:, low:high])
    first = torch.zeros((1, len(here)), dtype=torch.int64) if first is None else first
    part = replace(part, k=call.k[:, :, low:high], scoring=scoring)
    return _by_core_at_once(part, here, Layout(used, torch.where(first < 0, -1, first - low)), low)


def _by_core_at_once(call: Call, index: Tensor, rows: Layout, start: int = 0) -> Fields:
    """`index`: the places of the queries in their sequence, (R,), or (B, R); `start`: that of the first key."""
    q, S = call.q, call.k.shape[2]
    state = unwritten(tuple(q.shape[:3]), None, np.float64 if q.dtype is torch.float64 else np.float32, S)
    keywords: dict[str, Any] = {}
    for b, each in enumerate(index if index.dim() == 2 else index[None]):
        here = slice(b, b + 1) if index.dim() == 2 else slice(None)
        part = call.of_batch(b) if index.dim() == 2 else call
        keywords = for_core(part.scoring, part.q, part.k)
        if not torch.equal(each, torch.arange(len(each))):
            keywords["query_runs"] = _runs(each)
        if start:
            keywords["key_runs"] = [(start, S, 1)]
        if rows.first is not None:
            keywords["first_keys"] = rows.first[here].contiguous().numpy()
        sums, counts = state.sums[here], state.counts[here]
        _core.forward(memory(part.q), memory(part.k), None, sums=sums, counts=counts, **keywords)
    exists = None if rows.used is None else rows.used[:, None].numpy()
    return as_fields(
        stats.rows(state.sums, state.counts, keywords.get("sinks"), exists),
        None if rows.used is None else rows.used[:, None],
    )


def _runs(index: Tensor) -> list[tuple[int, int, int]]:
    if torch.equal(index, torch.arange(len(index)) + index[0]):  # a sample may have a row twice
        return [(int(index[0]), len(index), 1)]
    return [(row, 1, 1) for row in index.tolist()]


# ---- rows to heads


def summed(parts: Iterator[Fields], sampled: Tensor | None, call: Call, used: Tensor | None = None) -> Tensor:
    """The tally (H, columns) of a call's rows, in parts (B, H, T) of its batch rows; `sampled`: the positions of the
    rows, (T,), or (B, T) of all batch rows; `used` (B, T): those of all queries that count."""
    heads: Tensor | None = None
    before = 0
    for fields in parts:
        B, H, T = fields["count"].shape
        if B * T:
            own = sampled if sampled is None or sampled.dim() == 1 else sampled[before : before + B]
            part: Tensor = tally.of_rows(fields, torch, positions=own)
            batch = part[:, tally.INDEX["max_batch"]]
            batch += before * (batch >= 0)
        else:
            part = torch.from_numpy(tally.nothing(H)).to(fields["mean"])
        heads, before = part if heads is None else tally.merge(heads, part, torch), before + B
    assert heads is not None
    fill_squares(heads, call.q, call.k, used)
    return heads


# ---- variations


def rescaled(call: Call, times: float, *, by_torch: bool | None = None) -> Call:
    """The call with its products multiplied by so much more; ready-made scores as a whole."""
    if call.ready:
        # Before what stands in for -inf becomes something else.
        hidden = _hidden(call, _hiding(call, wait=_path(call, by_torch) == CORE)).scoring
        return replace(call, scoring=hidden._replace(mask=hidden.mask * times))
    return replace(call, scoring=call.scoring._replace(scale=call.scoring.scale * times))


def squares(x: Tensor) -> Tensor:
    """The mean of x²."""
    return x.detach().to(wide(x)).square().mean()
