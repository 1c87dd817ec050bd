"""From the description of a call to the tally of its heads.

On the CPU the core makes one pass that computes statistics only; elsewhere plain torch does, some rows at a time, on
the tensors' own device and without waiting for it. Both give the same fields per query row, and `tally.of_rows` sums
them up. Modules and steps are unknown here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from levelhead import stats
from levelhead.attention import observe
from levelhead.runs import tally
from levelhead.torch.huggingface.masks import hides

Fields: TypeAlias = dict[str, Tensor]  # name -> (B, H, T)

# Logits that plain torch holds at a time: 64 MiB of float32, a few times over.
_AT_A_TIME = 1 << 24


@dataclass(frozen=True)
class Call:
    """Everything between q, k and the softmax. Query i sits at position start + i."""

    q: Tensor  # (B, H, T, D)
    k: Tensor  # (B, G, S, D); H is a multiple of G
    scale: float | Tensor  # one, or one per head
    mask: Tensor | None = None  # bool (True: visible) or additive, broadcastable to (B, H, T, S)
    causal: bool = False
    start: int = 0
    left: int | None = None  # keys from position - left on
    right: int | None = None  # keys up to position + right
    softcap: float | None = None
    sinks: Tensor | None = None  # (H,)
    ready: bool = False  # the mask holds the logits, and the product is zero

    @property
    def heads(self) -> int:
        return self.q.shape[1]


def plain(x: Tensor) -> bool:
    """Whether its numbers can be read: no nested, sparse, meta, traced or vmapped tensor."""
    if x.is_nested or x.layout is not torch.strided or x.is_meta:
        return False
    return type(x) in _PLAIN and not torch._C._functorch.is_functorch_wrapped_tensor(x)


_PLAIN = (Tensor, torch.nn.Parameter)


def from_scores(scores: Tensor) -> Call:
    """The call whose logits are these (B, H, T, S), already made: a bias on products of zero."""
    B, H, T, S = scores.shape
    wide = torch.float64 if scores.dtype is torch.float64 else torch.float32
    q, k = (scores.new_zeros((B, H, n, 1), dtype=wide) for n in (T, S))
    return Call(q, k, 1.0, scores.to(wide), ready=True)


def tallied(call: Call, *, sample: int | None = None, by_torch: bool | None = None) -> Tensor:
    """The tally (H, columns) of a call, on its device; `sample`: of so many rows, evenly spread.

    `by_torch` forces the path for other devices.
    """
    with torch.autocast(call.q.device.type, enabled=False):  # statistics must not be rounded
        return _tallied(call, sample, by_torch)


def _tallied(call: Call, sample: int | None, by_torch: bool | None) -> Tensor:
    call = whole = _hidden(_detached(call))
    T = call.q.shape[2]
    rows: Tensor | None = None
    if sample is not None and sample < T:
        rows = torch.linspace(0, T - 1, sample, device=call.q.device).round().long()
        call = _sampled(call, rows)
    elsewhere = call.q.device.type != "cpu" if by_torch is None else by_torch
    heads = summed(_by_torch(call) if elsewhere else _by_core(call), rows)
    fill_squares(heads, whole.q, whole.k)
    return heads


def from_core(sums: Any, counts: Any, sinks: Any, call: Call, positions: Tensor | None = None) -> Tensor:
    """The same from the states of a fused pass, NumPy arrays (B, H, T, ...); `positions`: of the rows, if they are only
    some of their sequence."""
    rows = stats.rows(sums, counts, sinks)
    heads = summed(_as_fields(rows, call.q.shape[:3]), positions)
    fill_squares(heads, call.q, call.k)
    return heads


def fill_squares(heads: Tensor, q: Tensor, k: Tensor) -> None:
    """Sets the sums of q² and k² of all heads of a tally."""
    for name, x in (("q", q.detach()), ("k", k.detach())):
        squares = x.to(_wide(x)).square().sum((0, 2, 3))
        shared = heads.shape[0] // max(x.shape[1], 1)
        heads[:, tally.INDEX[f"{name}_squares"]] = squares.repeat_interleave(shared).to(heads)
        heads[:, tally.INDEX[f"{name}_count"]] = x.shape[0] * x.shape[2] * x.shape[3]


def folded(into: Tensor, new: Tensor) -> Tensor:
    """Both tallies as one."""
    joined: Tensor = tally.merge(into, new, torch)
    return joined


# ---- the call as both paths read it


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _detached(call: Call) -> Call:
    parts = {name: getattr(call, name) for name in ("q", "k", "mask", "sinks", "scale")}
    tensors: Any = {name: x.detach() for name, x in parts.items() if isinstance(x, Tensor)}
    return replace(call, **tensors)


def _hidden(call: Call) -> Call:
    """With -inf wherever a mask hides: models write a huge number instead."""
    mask = call.mask
    if mask is None or mask.dtype is torch.bool:
        return call
    if mask.dtype not in (call.q.dtype, torch.float32):
        mask = mask.to(_wide(call.q))
    return replace(call, mask=mask.masked_fill(hides(mask), -math.inf))


def visible_keys(call: Call, rows: Tensor | None = None) -> Tensor | None:
    """Which keys those rows may see by their positions, (T, S); None: all."""
    if not call.causal and call.left is None and call.right is None:
        return None
    device = call.q.device
    if rows is None:
        rows = torch.arange(call.q.shape[2], device=device)
    position, key = (rows + call.start)[:, None], torch.arange(call.k.shape[2], device=device)
    visible = key <= position if call.causal else key >= 0
    if call.left is not None:
        visible = visible & (key >= position - call.left)
    if call.right is not None:
        visible = visible & (key <= position + call.right)
    return visible


def _with_mask(mask: Tensor | None, visible: Tensor | None) -> Tensor | None:
    if mask is None or visible is None:
        return visible if mask is None else mask
    return mask & visible if mask.dtype is torch.bool else mask.masked_fill(~visible, -math.inf)


def _sampled(call: Call, rows: Tensor) -> Call:
    """The call with those rows alone; a mask replaces what followed from positions."""
    mask = call.mask
    if mask is not None and mask.dim() > 1 and mask.shape[-2] > 1:
        mask = mask.index_select(-2, rows)
    mask = _with_mask(mask, visible_keys(call, rows))
    q = call.q.index_select(2, rows)
    return replace(call, q=q, mask=mask, causal=False, left=None, right=None)


# ---- two ways to the fields of every row


def _by_core(call: Call) -> Fields:
    window = None if call.left is None and call.right is None else (call.left, call.right)
    seen = observe(
        call.q,
        call.k,
        scale=call.scale,
        causal=call.causal,
        window=window,
        mask=call.mask,
        softcap=call.softcap,
        sinks=call.sinks,
        query_start=call.start,
    )
    return _as_fields(seen.rows, call.q.shape[:3])


def _as_fields(rows: stats.Rows, shape: Any) -> Fields:
    names = (*_ROW_FIELDS, "count", "argmax")
    return {name: torch.from_numpy(np.asarray(getattr(rows, name))).reshape(shape) for name in names}


_ROW_FIELDS = ("mean", "var", "min", "max", "logsumexp", "entropy", "top1", "sum_p2", "first", "sink")


def _by_torch(call: Call) -> Fields:
    pieces = [_piece(logits, call.sinks) for logits in _logits(call)]
    if not pieces:
        pieces = [_piece(call.q.new_empty((*call.q.shape[:3], 1)), call.sinks)]
    return {name: torch.cat([piece[name] for piece in pieces], 2) for name in pieces[0]}


def _logits(call: Call) -> Iterator[Tensor]:
    """(B, H, rows, S) logits, -inf where hidden, some rows at a time."""
    wide = _wide(call.q)
    B, H, T, D = call.q.shape
    G, S = call.k.shape[1], call.k.shape[2]
    keys = call.k.to(wide).transpose(-1, -2).unsqueeze(2)
    scale: Any = call.scale
    if isinstance(scale, Tensor):
        scale = scale.to(call.q.device, wide).reshape(-1, 1, 1)
    step = max(1, _AT_A_TIME // max(B * H * S, 1))
    for first in range(0, T, step):
        last = min(T, first + step)
        q = call.q[:, :, first:last].to(wide).reshape(B, G, H // max(G, 1), last - first, D)
        s = (q @ keys).reshape(B, H, last - first, S) * scale
        if call.softcap is not None:
            s = call.softcap * torch.tanh(s / call.softcap)
        rows = slice(first, last)
        mask = call.mask
        if mask is not None:
            if mask.dim() > 1 and mask.shape[-2] > 1:
                mask = mask[..., rows, :]
            s = s.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else _biased(s, mask)
        visible = visible_keys(call, torch.arange(first, last, device=call.q.device))
        yield s if visible is None else s.masked_fill(~visible, -math.inf)


def _biased(s: Tensor, mask: Tensor) -> Tensor:
    """s + mask; -inf in the mask hides, also where s is NaN."""
    return torch.where(mask == -math.inf, -math.inf, s + mask.to(s.dtype))


def _piece(s: Tensor, sinks: Tensor | None) -> Fields:
    """The fields of rows whose logits are s (B, H, T, S); formulas as in `stats.rows`."""
    if s.shape[-1] == 0:
        s = s.new_full((*s.shape[:-1], 1), -math.inf)
    shown = s != -math.inf
    count = shown.sum(-1)
    some = count > 0
    m = s.amax(-1)
    sure = torch.where(some, m, 0.0)
    sink = None if sinks is None else sinks.to(s.dtype)[:, None].expand_as(m)
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
    argmax = torch.where(some & ~wrong, s.argmax(-1), -1)
    return fields | {"count": count, "argmax": argmax}


# ---- rows to heads


def summed(fields: Fields, sampled: Tensor | None) -> Tensor:
    """The tally (H, columns) of rows (B, H, T); `sampled`: the positions of the rows."""
    B, H, T = fields["count"].shape
    if not B * T:
        return torch.from_numpy(tally.nothing(H)).to(fields["mean"])
    columns: Tensor = tally.of_rows(fields, torch, positions=sampled)
    return columns


# ---- variations


def rescaled(call: Call, times: float) -> Call:
    """The call with its products multiplied by so much more; ready-made scores as a whole."""
    if call.ready:
        whole = _hidden(call)  # before what stands in for -inf becomes something else
        assert whole.mask is not None
        return replace(whole, mask=whole.mask * times)
    return replace(call, scale=call.scale * times)


def squares(x: Tensor) -> Tensor:
    """The mean of x²."""
    x = x.detach().to(_wide(x))
    return x.square().mean()
