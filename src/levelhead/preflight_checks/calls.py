"""The attention calls of a pass, as `watch` describes them: logits and visible keys in full, for a small batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from levelhead import reference
from levelhead.preflight_checks.inputs import Batch
from levelhead.preflight_checks.passes import Part, in_parts, run
from levelhead.runs.record import Run
from levelhead.torch.masks import hiding
from levelhead.watching.mask_functions import scored, visible
from levelhead.watching.measure import Call
from levelhead.watching.watch import watch

_LARGEST = 1 << 25  # logits of one call; beyond, nothing is said about single keys


@dataclass(frozen=True)
class SeenCall:
    """One attention call."""

    module: str
    call: Call
    q: Tensor  # (B, H, T, D), what the logits are products of
    k: Tensor  # (B, G, S, D)
    logits: Tensor | None  # (B, H, T, S); hidden: -inf or what stands for it. None: too many

    @property
    def square(self) -> bool:
        """Whether there are as many queries as keys, and more than two."""
        return self.queries == self.keys > 2

    @property
    def heads(self) -> int:
        return self.call.q.shape[1]

    @property
    def queries(self) -> int:
        return self.call.q.shape[2]

    @property
    def keys(self) -> int:
        return self.call.k.shape[2]

    @property
    def whole(self) -> bool:
        """Whether q and k have the sizes of the call: of scores put together from parts they have not."""
        return self.q.shape[:3] == self.call.q.shape[:3] and self.k.shape[2] == self.keys

    def hidden(self) -> Tensor | None:
        """(B, H, T, S)"""
        if self.logits is None:
            return None
        logits = self.logits.nan_to_num(nan=0.0, neginf=-math.inf)
        return ~(logits > hiding(logits))

    def shown(self) -> Tensor | None:
        """(T, S): keys that a query sees in any row or head."""
        hidden = self.hidden()
        return None if hidden is None else ~hidden.all(0).all(0)


def seen_calls(
    batch: Batch,
    around: Callable[[], list[Any]] = list,
    *,
    deep: bool = True,
    parts: Sequence[Part] = (),
    marks: list[int] | None = None,
    **options: Any,
) -> tuple[Run, list[SeenCall]]:
    """One watched pass; `around` registers hooks for it. `parts`: these passes in its place; `marks`: where the calls
    of each begin is added there."""
    found: list[SeenCall] = []
    begins: list[int] = [] if marks is None else marks

    def listen(watched: Any, call: Call, tally: Tensor, q: Tensor, k: Tensor, *more: Any) -> None:
        copies = q.detach().clone(), k.detach().clone()  # of a cache that the model keeps, which is put back
        found.append(SeenCall(watched.name, call, *copies, _logits(call)))

    with watch(batch.model, deep=deep, rows=None, **options) as watching:
        watching.listeners.append(listen)
        handles = around()
        try:
            run(batch, call=in_parts(parts, lambda: begins.append(len(found))) if parts else None)
        finally:
            for handle in handles:
                handle.remove()
    return watching.run(), found


def _logits(call: Call) -> Tensor | None:
    B, H, T, D = call.q.shape
    G, S = call.k.shape[1:3]
    if B * H * T * S > _LARGEST or call.scoring.cosine:
        return None
    real = torch.float64 if call.q.dtype is torch.float64 else torch.float32
    products = call.q.to(real).reshape(B, G, -1, T, D) @ call.k.to(real).mT.unsqueeze(2)
    i, j = torch.arange(T, device=call.q.device), torch.arange(S, device=call.q.device)
    tensors = {name: x for name, x in call.scoring._asdict().items() if isinstance(x, Tensor)}
    wide: dict[str, Any] = {name: x.to(real) for name, x in tensors.items() if x.is_floating_point()}
    logits: Tensor = reference.score(call.scoring._replace(**wide), products.reshape(B, H, T, S), i, j)
    if call.score_mod is not None:
        logits = torch.where(logits == -math.inf, logits, scored(call.score_mod, logits, i, j))
    if call.mask_mod is not None:
        logits = logits.masked_fill(~visible(call.mask_mod, torch.arange(B, device=i.device), H, i, j), -math.inf)
    return logits.detach()
