"""The statistics of every query row by plain torch: on the tensors' own device, some rows at a time.

For tensors that neither the core nor the Triton kernel reads, and for scores that a function changes. Logits become the
columns of a state, and `stats.rows` computes the fields, as for the core. Keys that no row of a piece can see by its
position are left out of the product, where the position is known without waiting for the device. The passes are not
compiled: docs/gpu.md has what that was measured to bring, and why it is not done.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from levelhead import reference, state, stats
from levelhead.torch.masks import hiding
from levelhead.watching.described import Call, tensors_of, wide
from levelhead.watching.mask_functions import scored, visible

Fields: TypeAlias = dict[str, Tensor]  # name -> (B, H, T)
NAMES = ("mean", "var", "min", "max", "logsumexp", "entropy", "top1", "sum_p2", "first", "sink", "count", "argmax")

# Logits that are held at a time: 64 MiB of float32, a few times over.
_AT_A_TIME = 1 << 24


def rows_by_torch(call: Call, index: Tensor, used: Tensor | None, first: Tensor | None, length: int) -> Fields:
    """The fields of a call's T queries, whose places in a sequence of that length are `index`, (T,) or (B, T): one of
    each of T strata of equal size. `used` and `first` (B, T): which count, and their first keys."""
    sums, counts = states_by_torch(call, index, first, length)
    sinks, exists = call.scoring.sinks, None if used is None else used[:, None]
    return as_fields(stats.rows(sums, counts, None if sinks is None else sinks.to(sums), exists), exists)


def states_by_torch(call: Call, index: Tensor, first: Tensor | None, length: int) -> tuple[Tensor, Tensor]:
    """The states of these queries: sums (B, H, T, 8) and counts (B, H, T, 2)."""
    pieces = list(_pieces(call, index, first, length))
    if not pieces:
        pieces = [_states(call.q.new_empty((*call.q.shape[:3], 1), dtype=wide(call.q)), 0, None)]
    sums, counts = (torch.cat(x, 2) for x in zip(*pieces, strict=True))
    return sums, counts


def joined(pieces: list[Fields]) -> Fields:
    """Pieces with the rows of one call, in order."""
    return {name: torch.cat([piece[name] for piece in pieces], 2) for name in pieces[0]}


def _pieces(call: Call, index: Tensor, first: Tensor | None, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The states of some rows at a time, from logits (B, H, rows, keys)."""
    real, device = wide(call.q), call.q.device
    B, H, T, D = call.q.shape
    G, S = call.k.shape[1], call.k.shape[2]
    tensors = {name: x.to(device) for name, x in tensors_of(call.scoring).items()}
    tensors |= {name: x.to(real) for name, x in tensors.items() if x.is_floating_point()}
    q, k = (functional.normalize(x.to(real), dim=-1) if call.scoring.cosine else x for x in (call.q, call.k))
    whole = replace(call, q=q, k=k, scoring=call.scoring._replace(**tensors), rows=None)
    keys = k.to(real).transpose(-1, -2).unsqueeze(2)
    ends = call.scoring.causal or call.scoring.left is not None or call.scoring.right is not None
    step = max(1, _AT_A_TIME // (4 if ends else 1) // max(B * H * S, 1))  # smaller pieces leave more keys out
    for start in range(0, T, step):
        chosen = torch.arange(start, min(T, start + step), device=device)
        low, high = _within_reach(call, start, len(chosen), length)
        part = _of_keys(whole.of_rows(chosen), low, high)
        j = torch.arange(low, high, device=device)
        products = part.q.to(real).reshape(B, G, H // max(G, 1), len(chosen), D) @ keys[..., low:high]
        here = index.index_select(-1, chosen)
        logits = reference.score(part.scoring, products.reshape(B, H, len(chosen), high - low), here, j)
        if call.score_mod is not None:
            logits = torch.where(logits == -math.inf, -math.inf, scored(call.score_mod, logits, here, j))
            logits = logits.masked_fill(logits <= hiding(logits), -math.inf)
        if call.mask_mod is not None:
            shown = visible(call.mask_mod, torch.arange(B, device=device), H, here, j)
            logits = logits.masked_fill(~shown, -math.inf)
        yield _states(logits, low, None if first is None else first[:, chosen])


def _within_reach(call: Call, start: int, rows: int, length: int) -> tuple[int, int]:
    """From which key to which the rows from `start` on can see anything by position, as far as that is known here."""
    scoring, S, T = call.scoring, call.k.shape[2], call.q.shape[2]
    if scoring.query_start is not None and call.start is None:
        return 0, S
    p = call.start or 0
    low = 0 if scoring.left is None else p + start * length // T - scoring.left
    ahead = [x for x in (0 if scoring.causal else None, scoring.right) if x is not None]
    high = p - (start + rows) * length // -T + min(ahead) if ahead else S  # a stratum may end within a row
    high = min(max(high, 0), S)
    return min(max(low, 0), high), high


def _of_keys(call: Call, low: int, high: int) -> Call:
    """The options of some keys."""
    mask, ids = call.scoring.mask, call.scoring.key_segments
    if mask is not None and mask.dim() and mask.shape[-1] > 1:
        mask = mask[..., low:high]
    return replace(
        call, scoring=call.scoring._replace(mask=mask, key_segments=None if ids is None else ids[:, low:high])
    )


def as_fields(rows: stats.Rows, exists: Any) -> Fields:
    """By name, (B, H, T) each; `exists`, broadcastable to that."""
    fields = {name: torch.as_tensor(getattr(rows, name)) for name in NAMES}
    return fields if exists is None else fields | {"exists": exists.expand_as(fields["count"])}


def _states(s: Tensor, low: int, first: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sums (B, H, T, 8) and counts (B, H, T, 2) of rows whose logits are s (B, H, T, S), of the keys from `low` on.
    `first` (B, T): their first keys; None: key 0. Few passes over s, which is changed: each moves all of it."""
    if s.shape[-1] == 0:
        s = s.new_full((*s.shape[:-1], 1), -math.inf)
    S = s.shape[-1]
    at_first = _at(s, low, first)
    hidden = s == -math.inf
    count = S - hidden.sum(-1)
    m, argmax = s.max(-1)
    top = torch.where(count == 0, 0.0, m)[..., None]
    s -= top
    weights = s.exp()
    s.masked_fill_(hidden, 0.0)  # the distance of the maximum: hidden keys then add nothing
    l = weights.sum(-1)  # noqa: E741
    h = (weights.unsqueeze(-2) @ s.unsqueeze(-1))[..., 0, 0]
    e2 = torch.linalg.vector_norm(weights, dim=-1).square()
    least = torch.where(count == 0, math.inf, top[..., 0] + s.amin(-1))
    off = s.sum(-1) / count.clamp(min=1)
    s -= off[..., None]
    s.masked_fill_(hidden, 0.0)
    m2 = torch.linalg.vector_norm(s, dim=-1).square()
    natural = (m, l, h, e2, top[..., 0] + off, m2, least)
    wrong = torch.isnan(l)
    columns = [torch.where(wrong, l, x) / unit for x, unit in zip(natural, state.NATURAL, strict=False)]
    sums = torch.stack([*columns, at_first / state.LN2], -1)
    return sums, torch.stack([count, torch.where(wrong | (count == 0), -1, argmax + low)], -1)


def _at(s: Tensor, low: int, first: Tensor | None) -> Tensor:
    """s (B, H, T, S), of the keys from `low` on, at one key of each row (B, T); -inf where it has none."""
    if first is None:
        return s[..., 0].clone() if low == 0 else s.new_full(s.shape[:-1], -math.inf)
    key = first - low
    outside = (key < 0) | (key >= s.shape[-1])
    chosen = key.clamp(0, s.shape[-1] - 1)[:, None, :, None].expand(-1, s.shape[1], -1, 1)
    return s.gather(-1, chosen)[..., 0].masked_fill(outside[:, None], -math.inf)
