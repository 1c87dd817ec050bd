"""The statistics of every query row by plain torch: on the tensors' own device, some rows at a time.

For tensors that the core cannot read, and for scores that a function changes. The fields are those of the core's states
in `stats.rows`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from levelhead import reference
from levelhead.torch.masks import hiding
from levelhead.watching.described import Call, tensors_of, wide
from levelhead.watching.mask_functions import scored, visible

Fields: TypeAlias = dict[str, Tensor]  # name -> (B, H, T)

# Logits that are held at a time: 64 MiB of float32, a few times over.
_AT_A_TIME = 1 << 24


def rows_by_torch(call: Call, index: Tensor, used: Tensor | None, first: Tensor | None) -> Fields:
    """The fields of a call's queries, whose places in their sequence are `index`. `used` and `first` (B, T): which
    count, and their first keys."""
    pieces = list(_pieces(call, index, used, first))
    if not pieces:
        pieces = [_fields(call.q.new_empty((*call.q.shape[:3], 1)), call.scoring.sinks, None, None)]
    return joined(pieces)


def joined(pieces: list[Fields]) -> Fields:
    """Pieces with the rows of one call, in order."""
    return {name: torch.cat([piece[name] for piece in pieces], 2) for name in pieces[0]}


def _pieces(call: Call, index: Tensor, used: Tensor | None, first: Tensor | None) -> Iterator[Fields]:
    """The fields of some rows at a time, from logits (B, H, rows, S)."""
    real, device = wide(call.q), call.q.device
    B, H, T, D = call.q.shape
    G, S = call.k.shape[1], call.k.shape[2]
    j = torch.arange(S, device=device)
    tensors = {name: x.to(device) for name, x in tensors_of(call.scoring).items()}
    tensors |= {name: x.to(real) for name, x in tensors.items() if x.is_floating_point()}
    q, k = (functional.normalize(x.to(real), dim=-1) if call.scoring.cosine else x for x in (call.q, call.k))
    whole = replace(call, q=q, k=k, scoring=call.scoring._replace(**tensors), rows=None)
    keys = k.to(real).transpose(-1, -2).unsqueeze(2)
    step = max(1, _AT_A_TIME // max(B * H * S, 1))
    for start in range(0, T, step):
        chosen = torch.arange(start, min(T, start + step), device=device)
        part = whole.of_rows(chosen)
        products = part.q.to(real).reshape(B, G, H // max(G, 1), -1, D) @ keys
        here = index.index_select(0, chosen)
        logits = reference.score(part.scoring, products.reshape(B, H, -1, S), here, j)
        if call.score_mod is not None:
            logits = torch.where(logits == -math.inf, -math.inf, scored(call.score_mod, logits, here, j))
            logits = logits.masked_fill(logits <= hiding(logits), -math.inf)
        if call.mask_mod is not None:
            shown = visible(call.mask_mod, torch.arange(B, device=device), H, here, j)
            logits = logits.masked_fill(~shown, -math.inf)
        exists = None if used is None else used[:, None, chosen]
        yield _fields(logits, part.scoring.sinks, exists, None if first is None else first[:, chosen])


def _at(p: Tensor, key: Tensor) -> Tensor:
    """p (B, H, T, S) at one key of each row (B, T); 0 where there is none."""
    chosen = key.clamp(min=0)[:, None, :, None].expand(-1, p.shape[1], -1, 1)
    return p.gather(-1, chosen)[..., 0].masked_fill((key < 0)[:, None], 0.0)


def _fields(s: Tensor, sinks: Tensor | None, exists: Tensor | None, first: Tensor | None) -> Fields:
    """The fields of rows whose logits are s (B, H, T, S); formulas as in `stats.rows`. `first` (B, T): their first
    keys; None: key 0."""
    if s.shape[-1] == 0:
        s = s.new_full((*s.shape[:-1], 1), -math.inf)
    shown = s != -math.inf
    count = shown.sum(-1)
    some = count > 0
    m = s.amax(-1)
    sure = torch.where(some, m, 0.0)
    sink = None if sinks is None else sinks.to(s.dtype)[:, None].expand_as(m)
    if sink is not None and exists is not None:
        sink = sink.masked_fill(~exists, -math.inf)
    logsumexp = torch.logsumexp(s, -1)
    if sink is not None:
        logsumexp = torch.logaddexp(logsumexp, sink)
    finite = torch.where(logsumexp == -math.inf, 0.0, logsumexp)
    x = torch.where(shown, s - finite[..., None], -math.inf)
    p = x.exp()
    entropy = -torch.where(p > 0, p * x, 0.0).sum(-1)
    sum_p2 = p.square().sum(-1)
    weight = torch.zeros_like(m)
    if sink is not None:
        weight = (sink - finite).exp()
        entropy = entropy - torch.where(weight > 0, weight * (sink - finite), 0.0)
        sum_p2 = sum_p2 + weight.square()
    n = count.clamp(min=1)
    mean = torch.where(shown, s, 0.0).sum(-1) / n
    var = torch.where(shown, s - mean[..., None], 0.0).square().sum(-1) / n
    wrong = (torch.isnan(s) | (s == math.inf)).any(-1)
    fields = {
        "mean": torch.where(some, mean, math.nan),
        "var": torch.where(some, var, math.nan),
        "min": torch.where(shown, s, math.inf).amin(-1),
        "max": m,
        "logsumexp": logsumexp,
        "entropy": entropy.clamp(min=0.0),
        "top1": torch.where(some, (sure - finite).exp(), 0.0),
        "sum_p2": sum_p2.clamp(max=1.0),
        "first": p[..., 0] if first is None else _at(p, first),
        "sink": weight,
    }
    fields = {name: torch.where(wrong, math.nan, x) for name, x in fields.items()}
    fields |= {"count": count, "argmax": torch.where(some & ~wrong, s.argmax(-1), -1)}
    return fields if exists is None else fields | {"exists": exists.expand_as(count)}
