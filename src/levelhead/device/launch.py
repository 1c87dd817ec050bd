"""Runs the observing kernel on a described call: block sizes, memory, arguments, and the join of key ranges.

It imports Triton. Nothing here waits for the device.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional

from levelhead import stats
from levelhead.call.options import Scoring, logit_cap
from levelhead.device import tiles
from levelhead.device.hiding_kernel import hiding_kernel
from levelhead.device.kernel import join_kernel, observe_kernel
from levelhead.device.tally_kernel import COLUMNS, tally_kernel
from levelhead.torch import masks

INTERPRETED = bool(triton.knobs.runtime.interpret)
_HIGHEST_CAP = 1e30  # a higher one changes no logit, and overflows where it is multiplied
_READ, _PROGRAMS = 1024, 512  # numbers of a mask that a program reads at a time, and programs
_JOINED = 256  # rows that a program joins, or adds up at a time


def observe(
    q: Tensor,
    k: Tensor,
    scoring: Scoring,
    rows: Tensor | None,
    first_keys: Tensor | None,
    hiding: Tensor | None,
    parts: int,
    sums: Tensor,
    counts: Tensor,
) -> None:
    """Writes the states of a call to `sums` and `counts`, a column after another; arguments as in `operator`."""
    B, H, T, D = q.shape
    rows = None if rows is None else rows.expand(B, -1)
    R = T if rows is None else rows.shape[1]
    if scoring.cosine:
        q, k = (functional.normalize(x.float(), dim=-1) for x in (q, k))
    elif q.dtype != k.dtype:
        q, k = q.float(), k.float()
    q, k = _within_32_bits(q), _within_32_bits(k)
    arguments = _arguments(q, k, scoring, rows, first_keys, hiding)
    G, S = k.shape[1:3]
    group = H // G
    pack = group if R < 64 else 1  # heads that share keys are multiplied together where one alone has few rows
    block = tiles.tiles(D, q.element_size(), pack * R, _unit(q.device))
    programs = -(-pack * R // block.rows) * (H // pack) * B
    n, span = tiles.ranges(S, parts or tiles.parts(programs, S), block.keys)
    into = (sums, counts)
    if n > 1:
        into = (q.new_empty((n, 8, B, H, R), dtype=torch.float32), counts.new_empty((n, 2, B, H, R)))
    observe_kernel[(programs * n,)](
        q, k, *into, *arguments, *q.stride(), *k.stride(), *_mask_strides(arguments[3], q, k),
        B, H, R, S, T, span, GROUP=group, PACK=pack, CAUSAL=scoring.causal, ADDS=_adds(scoring.mask), D=D,
        BM=block.rows, BN=block.keys, BF=block.full, BD=block.width, WIDEN=INTERPRETED, num_warps=block.warps,
        num_stages=block.stages, **tiles.registers(_nvidia(q.device)),
    )  # fmt: skip
    if n > 1:
        total = B * H * R
        join_kernel[(-(-total // _JOINED),)](*into, sums, counts, total, n, BLOCK=_JOINED)


def tallied(sums: Tensor, counts: Tensor, sinks: Tensor | None, used: Tensor | None, places: Tensor | None) -> Tensor:
    """The tally (B, H, columns) of the states that `observe` wrote; see the kernel."""
    B, H, R = sums.shape[:3]
    tallies = sums.new_empty((B, H, COLUMNS.value))
    seen = None if used is None else used.contiguous().view(torch.uint8)
    own = None if sinks is None else sinks.to(sums.device, torch.float32).contiguous()
    places = None if places is None else places.expand(B, R).contiguous()
    arguments = (sums, counts, own, seen, places, tallies, B, H, R)
    tally_kernel[(H * B,)](*arguments, SATURATED=stats.SATURATED_ROW, BLOCK=_JOINED)
    return tallies


def hiding(values: Tensor, reach: Tensor) -> Tensor:
    """What `masks.hiding` finds without waiting, one number, in one launch for each of its steps and one to end the
    last."""
    values = _unstretched(values).contiguous()
    n = values.numel()
    programs = max(1, min(-(-n // _READ), _PROGRAMS))
    steps = masks.STEPS_UNREAD
    ends = values.new_empty((steps + 1, 3), dtype=torch.float64)
    found = values.new_empty((steps, 3, programs), dtype=torch.float32)
    for step in range(steps + 1):
        before = (ends[step - 1], found[step - 1]) if step else (None, None)
        after = found[step] if step < steps else None
        hiding_kernel[(programs if step < steps else 1,)](
            values, reach, before[0], ends[step], before[1], after, n, programs,
            FLOOR=masks.FLOOR, UNDERFLOW=masks.UNDERFLOW, MOST_PROGRAMS=_PROGRAMS, BLOCK=_READ,
        )  # fmt: skip
    return ends[-1, 0]


@cache
def _unit(device: torch.device) -> str:
    """What multiplies matrices there."""
    if device.type != "cuda":
        return tiles.BLOCK
    return tiles.unit(_nvidia(device), torch.cuda.get_device_capability(device)[0])


def _within_32_bits(x: Tensor) -> Tensor:
    """x, copied if numbers of one tile lie further apart than the kernel's offsets inside a tile reach."""
    far = max(tiles.MOST_KEYS * x.stride(2), x.shape[3] * x.stride(3)) >= 1 << 31
    return x.contiguous() if far else x


def _nvidia(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None


def _adds(mask: Tensor | None) -> bool:
    return mask is not None and mask.dtype is not torch.bool


def _unstretched(x: Tensor) -> Tensor:
    """x, every stretched dimension once: a copy would make it whole."""
    for d, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        x = x.narrow(d, 0, 1) if stride == 0 and size > 1 else x
    return x


def _mask_strides(mask: Tensor | None, q: Tensor, k: Tensor) -> tuple[int, ...]:
    return (0, 0, 0, 0) if mask is None else mask.expand(*q.shape[:3], k.shape[2]).stride()


def _arguments(
    q: Tensor, k: Tensor, scoring: Scoring, rows: Tensor | None, first_keys: Tensor | None, hiding: Tensor | None
) -> tuple[Any, ...]:
    """From `scale` to `right`, as the kernel takes them; on q's device, contiguous."""
    device = q.device

    def here(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        return None if x is None else x.to(device, dtype).contiguous()

    mask = scoring.mask
    if mask is not None:
        mask = _unstretched(mask).to(device)
        if mask.dtype is torch.bool:
            mask = mask.view(torch.uint8)
        elif mask.dtype is torch.float64:
            mask = mask.float()
        if hiding is None and _adds(scoring.mask):
            hiding = torch.full((), -math.inf, dtype=torch.float64, device=device)
    cap = logit_cap(scoring._asdict())
    whole = torch.int64
    return (
        here(scoring.scale, torch.float64),
        None if cap is None else min(cap, _HIGHEST_CAP),
        here(scoring.alibi, torch.float64),
        mask,
        here(hiding, torch.float64) if _adds(scoring.mask) else None,
        here(scoring.key_lengths, whole),
        here(scoring.query_lengths, whole),
        here(scoring.query_segments, whole),
        here(scoring.key_segments, whole),
        here(scoring.query_start, whole),
        _row_factors(q, k, scoring, rows) if scoring.log_n else None,
        here(rows, whole),
        here(first_keys, whole),
        scoring.left,
        scoring.right,
    )


def _row_factors(q: Tensor, k: Tensor, scoring: Scoring, rows: Tensor | None) -> Tensor:
    """ln of the keys that position and segment leave to each row, (B, R)."""
    (B, _, T, _), S = q.shape, k.shape[2]
    index = torch.arange(T, device=q.device).expand(B, T) if rows is None else rows
    if scoring.query_segments is None:
        first, last = scoring.reach(index)
        left = last.clamp(max=S - 1) - first.clamp(min=0) + 1
    else:
        j = torch.arange(S, device=q.device)
        ids = scoring.query_segments.gather(-1, index)
        step = max(1, (1 << 24) // max(B * S, 1))
        some = (slice(start, start + step) for start in range(0, index.shape[1], step))
        left = torch.cat([scoring._replace(query_segments=ids[:, x]).visible(index[:, x], j).sum(-1) for x in some], 1)
    factors: Tensor = left.clamp(min=1).double().log().expand(B, -1).contiguous()
    return factors
