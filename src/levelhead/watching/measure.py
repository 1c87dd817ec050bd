"""From the description of a call to the tally of its heads.

On the CPU the core makes one pass that computes statistics only; elsewhere plain torch does, some rows at a time, on
the tensors' own device and without waiting for it. Both give the same fields per query row, and `tally.of_rows` sums
them up. Modules and steps are unknown here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from levelhead import _core, reference, stats
from levelhead.call.options import Scoring
from levelhead.runs import tally
from levelhead.state import unwritten
from levelhead.torch.masks import hides
from levelhead.torch.operators import for_core, memory, uniform
from levelhead.watching.mask_functions import scored, visible

Fields: TypeAlias = dict[str, Tensor]  # name -> (B, H, T)

# Logits that plain torch holds at a time: 64 MiB of float32, a few times over.
_AT_A_TIME = 1 << 24
# Entries of a mask that is made from a function at a time, per head: 4 MiB.
_MASK_AT_A_TIME = 1 << 22


@dataclass(frozen=True)
class Call:
    """An attention call: q, k, and everything between their product and the softmax."""

    q: Tensor  # (B, H, T, D)
    k: Tensor  # (B, G, S, D); H is a multiple of G
    scoring: Scoring  # of tensors
    ready: bool = False  # the mask holds the logits, and the product is zero
    rows: Tensor | None = None  # (B, T) bool: queries that the model uses; the others count in no statistic. None: all
    # Evaluated for some rows at a time, when the call is measured, after everything in `scoring`:
    mask_mod: Any = None  # (b, h, q, k) -> bool tensor, True: visible; or flex_attention's BlockMask
    score_mod: Callable[..., Any] | None = None  # (score, b, h, q, k) -> score

    @property
    def scale(self) -> Tensor | None:
        """What multiplies the products, (H,); None: not one number per head."""
        return None if self.scoring.cosine or self.scoring.log_n else self.scoring.scale


def call_of(q: Tensor, k: Tensor, scale: float | Tensor, start: int | None = None, **fields: Any) -> Call:
    """A call with one scale or one per head; `fields` are those of `Scoring`, and `start` is the first query's
    position."""
    factors = scale if isinstance(scale, Tensor) else uniform(q.shape[1], scale, q.device)
    if start is not None:
        fields["query_start"] = torch.full((q.shape[0],), start, device=q.device)
    return Call(q, k, Scoring(factors, **fields))


def plain(x: Tensor) -> bool:
    """Whether its numbers can be read: no nested, sparse, meta, traced or vmapped tensor."""
    if x.is_nested or x.layout is not torch.strided or x.is_meta:
        return False
    return type(x) in _PLAIN and not torch._C._functorch.is_functorch_wrapped_tensor(x)


_PLAIN = (Tensor, torch.nn.Parameter)


def from_scores(scores: Tensor) -> Call:
    """The call whose logits are these (B, H, T, S), already made: a bias on products of zero."""
    B, H, T, S = scores.shape
    wide = _wide(scores)
    q, k = (scores.new_zeros((B, H, n, 1), dtype=wide) for n in (T, S))
    return replace(call_of(q, k, 1.0, mask=scores.to(wide)), ready=True)


def tallied(call: Call, *, sample: int | None = None, by_torch: bool | None = None) -> Tensor:
    """The tally (H, columns) of a call, on its device; `sample`: of so many rows, evenly spread; `by_torch` forces the
    path for other devices."""
    with torch.autocast(call.q.device.type, enabled=False):  # statistics must not be rounded
        return _tallied(call, sample, by_torch)


def _tallied(call: Call, sample: int | None, by_torch: bool | None) -> Tensor:
    call = _hidden(_detached(call))
    T = call.q.shape[2]
    rows: Tensor | None = None
    if sample is not None and sample < T:
        rows = torch.linspace(0, T - 1, sample, device=call.q.device).round().long()
    elsewhere = call.q.device.type != "cpu" if by_torch is None else by_torch
    part = call if rows is None else _of_rows(call, rows)
    if elsewhere or call.score_mod is not None:
        return summed(_by_torch(part, rows), rows, call)
    return summed(_by_core(part, rows) if call.mask_mod is None else _by_core_in_parts(part, rows), rows, call)


def from_core(
    sums: Any, counts: Any, sinks: Any, call: Call, positions: Tensor | None = None, exists: Any = None
) -> Tensor:
    """The same from the states of a fused pass, (..., H, T, ...) NumPy arrays. `positions`: where the rows sit, if they
    are a part of a sequence. `exists`: rows that count, broadcastable to (B, H, T)."""
    shape = call.q.shape[:3]
    sums, counts = (x.reshape(*shape, x.shape[-1]) for x in (sums, counts))
    return summed(_as_fields(stats.rows(sums, counts, sinks, exists), shape, exists), positions, call)


def fill_squares(heads: Tensor, q: Tensor, k: Tensor) -> None:
    """Sets the sums of q² and k² of all heads of a tally."""
    for name, x in (("q", q.detach()), ("k", k.detach())):
        squares = x.to(_wide(x)).square().sum((0, 2, 3))
        shared = heads.shape[0] // max(x.shape[1], 1)
        heads[:, tally.INDEX[f"{name}_squares"]] = squares.repeat_interleave(shared).to(heads)
        heads[:, tally.INDEX[f"{name}_count"]] = x.shape[0] * x.shape[2] * x.shape[3]


# ---- the call as both paths read it


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _detached(call: Call) -> Call:
    tensors = {name: x.detach() for name, x in _tensors(call.scoring).items()}
    return replace(call, q=call.q.detach(), k=call.k.detach(), scoring=call.scoring._replace(**tensors))


def _tensors(scoring: Scoring) -> dict[str, Any]:
    return {name: x for name, x in scoring._asdict().items() if isinstance(x, Tensor)}


def _hidden(call: Call) -> Call:
    """Masks that stand in for -inf with a huge number, as models' masks do, hide for good."""
    mask = call.scoring.mask
    if mask is None or mask.dtype is torch.bool:
        return call
    if mask.dtype not in (call.q.dtype, torch.float32):
        mask = mask.to(_wide(call.q))
    mask = mask.masked_fill(hides(mask), -math.inf)
    return replace(call, scoring=call.scoring._replace(mask=mask))


def _of_rows(call: Call, rows: Tensor) -> Call:
    """The call of some query rows."""
    mask, ids = call.scoring.mask, call.scoring.query_segments
    if mask is not None and mask.dim() > 1 and mask.shape[-2] > 1:
        mask = mask.index_select(-2, rows)
    ids = None if ids is None else ids.index_select(-1, rows)
    scoring = call.scoring._replace(mask=mask, query_segments=ids)
    used = None if call.rows is None else call.rows.index_select(-1, rows)
    return replace(call, q=call.q.index_select(2, rows), scoring=scoring, rows=used)


# ---- two ways to the fields of every row


def _by_core(call: Call, rows: Tensor | None) -> Fields:
    """`rows`: the indices of these queries in their sequence; None: all of it, in order."""
    q, k, scoring = call.q, call.k, call.scoring
    keywords = for_core(scoring, q, k)
    if rows is not None:
        keywords["query_runs"] = [(row, 1, 1) for row in rows.tolist()]
    state = unwritten(tuple(q.shape[:3]), None, np.float64 if q.dtype is torch.float64 else np.float32, k.shape[2])
    _core.forward(memory(q), memory(k), None, sums=state.sums, counts=state.counts, **keywords)
    exists = existing(call, rows)
    return _as_fields(stats.rows(state.sums, state.counts, keywords.get("sinks"), exists), q.shape[:3], exists)


def _by_core_in_parts(call: Call, rows: Tensor | None) -> Fields:
    """With a mask given as a function, which becomes a tensor for some rows at a time."""
    (B, H, T, _), S = call.q.shape, call.k.shape[2]
    index = torch.arange(T) if rows is None else rows
    step = max(1, _MASK_AT_A_TIME // max(B * S, 1))
    parts = []
    for chosen in torch.split(torch.arange(T), step):
        part, here = _of_rows(call, chosen), index[chosen]
        shown = visible(call.mask_mod, (B, H), here, torch.arange(S))
        mask = part.scoring.mask
        if mask is not None:
            shown = shown & mask if mask.dtype is torch.bool else torch.where(shown, mask, -math.inf)
        parts.append(_by_core(replace(part, scoring=part.scoring._replace(mask=shown)), here))
    return _joined(parts) if parts else _by_core(replace(call, mask_mod=None), rows)


def _joined(parts: list[Fields]) -> Fields:
    return {name: torch.cat([part[name] for part in parts], 2) for name in parts[0]}


def existing(call: Call, rows: Tensor | None = None) -> Any:
    """Which rows exist and are used, a NumPy array (B, 1, T); None: all."""
    index = torch.arange(call.q.shape[2], device=call.q.device) if rows is None else rows
    exists = _counted(call, index)
    return None if exists is None else exists[:, None].cpu().numpy()


def _counted(call: Call, index: Tensor) -> Tensor | None:
    """Which of the call's rows count, (B, T); `index`: their places in the sequence."""
    exists: Tensor | None = call.scoring.exists(index)
    if exists is None or call.rows is None:
        return call.rows if exists is None else exists
    return exists & call.rows


def _as_fields(rows: stats.Rows, shape: Any, exists: Any) -> Fields:
    names = (*_ROW_FIELDS, "count", "argmax")
    fields = {name: torch.from_numpy(np.asarray(getattr(rows, name))).reshape(shape) for name in names}
    return fields if exists is None else fields | {"exists": torch.from_numpy(exists).expand(shape)}


_ROW_FIELDS = ("mean", "var", "min", "max", "logsumexp", "entropy", "top1", "sum_p2", "first", "sink")


def _by_torch(call: Call, rows: Tensor | None) -> Fields:
    pieces = list(_pieces(call, rows))
    if not pieces:
        pieces = [_piece(call.q.new_empty((*call.q.shape[:3], 1)), call.scoring.sinks, None)]
    return _joined(pieces)


def _pieces(call: Call, rows: Tensor | None) -> Iterator[Fields]:
    """The fields of some rows at a time, from logits (B, H, rows, S)."""
    real, device = _wide(call.q), call.q.device
    B, H, T, D = call.q.shape
    G, S = call.k.shape[1], call.k.shape[2]
    index = torch.arange(T, device=device) if rows is None else rows
    j = torch.arange(S, device=device)
    tensors = {name: x.to(device) for name, x in _tensors(call.scoring).items()}
    tensors |= {name: x.to(real) for name, x in tensors.items() if x.is_floating_point()}
    q, k = (functional.normalize(x.to(real), dim=-1) if call.scoring.cosine else x for x in (call.q, call.k))
    used = None if call.rows is None else call.rows.to(device)
    whole = replace(call, q=q, k=k, scoring=call.scoring._replace(**tensors), rows=used)
    keys = k.to(real).transpose(-1, -2).unsqueeze(2)
    step = max(1, _AT_A_TIME // max(B * H * S, 1))
    for first in range(0, T, step):
        chosen = torch.arange(first, min(T, first + step), device=device)
        part = _of_rows(whole, chosen)
        products = part.q.to(real).reshape(B, G, H // max(G, 1), -1, D) @ keys
        here = index.index_select(0, chosen)
        exists = _counted(part, here)
        logits = reference.score(part.scoring, products.reshape(B, H, -1, S), here, j)
        if call.score_mod is not None:
            logits = torch.where(logits == -math.inf, -math.inf, scored(call.score_mod, logits, here, j))
        if call.mask_mod is not None:
            logits = logits.masked_fill(~visible(call.mask_mod, (B, H), here, j), -math.inf)
        yield _piece(logits, part.scoring.sinks, None if exists is None else exists[:, None])


def _piece(s: Tensor, sinks: Tensor | None, exists: Tensor | None) -> Fields:
    """The fields of rows whose logits are s (B, H, T, S); formulas as in `stats.rows`."""
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
        "first": p[..., 0],
        "sink": weight,
    }
    fields = {name: torch.where(wrong, math.nan, x) for name, x in fields.items()}
    fields |= {"count": count, "argmax": torch.where(some & ~wrong, s.argmax(-1), -1)}
    return fields if exists is None else fields | {"exists": exists.expand_as(count)}


# ---- rows to heads


def summed(fields: Fields, sampled: Tensor | None, call: Call) -> Tensor:
    """The tally (H, columns) of a call's rows (B, H, T); `sampled`: the positions of the rows."""
    B, H, T = fields["count"].shape
    if B * T:
        heads: Tensor = tally.of_rows(fields, torch, positions=sampled)
    else:
        heads = torch.from_numpy(tally.nothing(H)).to(fields["mean"])
    fill_squares(heads, call.q, call.k)
    return heads


# ---- variations


def rescaled(call: Call, times: float) -> Call:
    """The call with its products multiplied by so much more; ready-made scores as a whole."""
    if call.ready:
        hidden = _hidden(call).scoring  # before what stands in for -inf becomes something else
        return replace(call, scoring=hidden._replace(mask=hidden.mask * times))
    return replace(call, scoring=call.scoring._replace(scale=call.scoring.scale * times))


def squares(x: Tensor) -> Tensor:
    """The mean of x²."""
    return x.detach().to(_wide(x)).square().mean()
