"""An attention call as a watch describes it, whichever function made it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from levelhead.call.options import BATCH, TOKENS, Scoring, fields
from levelhead.torch.operators import uniform


@dataclass(frozen=True)
class Call:
    """An attention call: q, k, and everything between their product and the softmax."""

    q: Tensor  # (B, H, T, D)
    k: Tensor  # (B, G, S, D); H is a multiple of G
    scoring: Scoring  # of tensors
    ready: bool = False  # the mask holds the logits, and the product is zero
    # (B, T) bool: queries that the model uses; the others count in no statistic. None: `documents` finds them
    rows: Tensor | None = None
    # Evaluated for some rows at a time, when the call is measured, after everything in `scoring`:
    mask_mod: Any = None  # (b, h, q, k) -> bool tensor, True: visible; or flex_attention's BlockMask
    score_mod: Callable[..., Any] | None = None  # (score, b, h, q, k) -> score
    appended: int = (
        0  # keys behind those of the sequence that belong to no token, such as nn.MultiheadAttention's bias_k
    )
    start: int | None = None  # the first query's position, where it is known without reading `scoring.query_start`
    # The keys are of another sequence than the queries, even if there are as many; a tensor on a device
    crossed: bool | Tensor = False
    gone: int = 0  # keys of the sequence that came before these, and have left a cache
    place: int = 1  # which of the places in the module's code that call attention (`call_sites`)

    @property
    def scale(self) -> Tensor | None:
        """What multiplies the products, (H,); None: not one number per head."""
        return None if self.scoring.cosine or self.scoring.log_n else self.scoring.scale

    def detached(self) -> Call:
        tensors = {name: x.detach() for name, x in tensors_of(self.scoring).items()}
        return replace(self, q=self.q.detach(), k=self.k.detach(), scoring=self.scoring._replace(**tensors))

    def of_rows(self, rows: Tensor) -> Call:
        """The call of some query rows: (R,), or (B, R) where each batch row has its own."""
        mask, ids = self.scoring.mask, self.scoring.query_segments
        if mask is not None and mask.dim() > 1 and mask.shape[-2] > 1:
            mask = _at_rows(mask, rows)
        ids, used = (None if x is None else at_rows(x, rows) for x in (ids, self.rows))
        return replace(
            self, q=_at_rows(self.q, rows), scoring=self.scoring._replace(mask=mask, query_segments=ids), rows=used
        )

    def of_batch(self, b: int) -> Call:
        """The call of one batch row. Functions still expect its number."""
        here = slice(b, b + 1)
        mask = self.scoring.mask
        if mask is not None and mask.dim() == 4 and mask.shape[0] > 1:
            mask = mask[here]
        per_row = {name: getattr(self.scoring, name) for name in fields(BATCH, TOKENS)}
        cut = {name: x[here] for name, x in per_row.items() if x is not None}
        used = None if self.rows is None else self.rows[here]
        return replace(self, q=self.q[here], k=self.k[here], scoring=self.scoring._replace(mask=mask, **cut), rows=used)


def at_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x (B, T) at rows (R,) or (B, R)."""
    return x.index_select(-1, rows) if rows.dim() == 1 else x.gather(-1, rows)


def _at_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x, broadcastable to (B, heads, T, columns), at rows (R,) or (B, R)."""
    if rows.dim() == 1:
        return x.index_select(-2, rows)
    x = x.reshape(*(1,) * (4 - x.dim()), *x.shape).expand(len(rows), -1, -1, -1)
    return x[torch.arange(len(rows), device=rows.device)[:, None], :, rows].transpose(1, 2)


def call_of(q: Tensor, k: Tensor, scale: float | Tensor, start: int | None = None, **fields: Any) -> Call:
    """A call with one scale or one per head; `fields` are those of `Scoring`, and `start` is the first query's
    position."""
    factors = scale if isinstance(scale, Tensor) else uniform(q.shape[1], scale, q.device)
    if start is not None:
        fields["query_start"] = torch.full((q.shape[0],), start, device=q.device)
    return Call(q, k, Scoring(factors, **fields), start=start)


def from_scores(scores: Tensor) -> Call:
    """The call whose logits are these (B, H, T, S), already made: a bias on products of zero."""
    B, H, T, S = scores.shape
    real = wide(scores)
    q, k = (scores.new_zeros((B, H, n, 1), dtype=real) for n in (T, S))
    return replace(call_of(q, k, 1.0, mask=scores.to(real)), ready=True)


def plain(x: Tensor) -> bool:
    """Whether its numbers can be read: no nested, sparse, meta, traced or vmapped tensor."""
    if type(x) not in _PLAIN:  # first: a subclass may compute what it is asked
        return False
    if x.is_nested or x.layout is not torch.strided or x.is_meta:
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(x)


_PLAIN = (Tensor, torch.nn.Parameter)


def wide(x: Tensor) -> torch.dtype:
    """What statistics of x are computed in."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def tensors_of(scoring: Scoring) -> dict[str, Any]:
    """The fields that are tensors, by name."""
    return {name: x for name, x in scoring._asdict().items() if isinstance(x, Tensor)}
