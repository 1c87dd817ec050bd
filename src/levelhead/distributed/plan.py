"""What the plans share: the result of a forward pass, memory for gradients, and keys and values packed into one tensor
for transfers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from levelhead.distributed import counted, local
from levelhead.distributed.call import Agreement
from levelhead.distributed.local import KeyBlock, QueryRows
from levelhead.distributed.split import Split
from levelhead.state import State
from levelhead.torch.operators import wide


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """The result of a forward pass for this rank's rows."""

    out: Tensor
    logsumexp: Tensor
    state: State | None  # only for `observe`
    kept: tuple[Tensor, ...] = ()  # for the backward pass, beside out and logsumexp
    sums: Tensor | None = None  # `OutputGradients.sums`
    exact: Tensor | None = None  # the output before it was rounded to a half type, if that is asked for


def buffers(
    rows: QueryRows, wanted: set[str], block: KeyBlock | None = None, *, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Memory for the gradients of q (in `dtype`), mask, scale and sinks, 0, and of the block's keys and values.

    Sums over blocks need at least float32, which is what None means.
    """
    real = wide(rows.q.dtype)
    grads: dict[str, Tensor] = {}
    if "q" in wanted:
        grads["q"] = torch.zeros_like(rows.q, dtype=dtype or real)
    if "mask" in wanted and rows.mask is not None:
        grads["mask"] = torch.zeros(rows.mask.shape, dtype=real)
    for name in {"scale", "sinks"} & wanted:
        grads[name] = torch.zeros(rows.scale.shape, dtype=torch.float64)
    if block is not None:
        grads |= {name: torch.empty(x.shape, dtype=real) for name, x in block.named(wanted).items()}
    return grads


def read(call: Agreement, states: State, *, stats: bool, precise: bool) -> ForwardResult:
    """The result of the states over all keys."""
    rows = call.rows
    out, logsumexp = local.read(states, rows, call.exists, rows.q.dtype)
    exact = local.read(states, rows, call.exists, wide(rows.q.dtype))[0] if precise else None
    sums = torch.from_numpy(states.sums) if local.has_far_rows(logsumexp) else None
    return ForwardResult(out, logsumexp, states if stats else None, (), sums, exact)


# ---- the "log-n" rule, where no rank sees all keys


def by_row(call: Agreement) -> tuple[QueryRows, Tensor | None]:
    """Rows for kernel calls over a part of the keys, and the factor of their queries.

    The kernel would count the keys of each call alone. So ln(n) of all keys is multiplied into the queries, which
    become float32 at least, so that no precision is lost.
    """
    rows = call.rows
    if not rows.options.get("log_n"):
        return rows, None
    n = torch.from_numpy(counted.keys_left(rows, call.keys.n))
    factor = torch.where(n > 0, n.clamp(min=1).to(torch.float64).log(), 0.0)
    factor = factor.reshape((*rows.q.shape[:-3], 1, rows.q.shape[-2], 1))
    q = (rows.q.detach().to(torch.float64) * factor).to(wide(rows.q.dtype))
    options = {name: value for name, value in rows.options.items() if name != "log_n"}
    return replace(rows, q=q, options=options), factor


def through_rows(dq: Tensor, factor: Tensor | None) -> Tensor:
    """The gradient of the queries before `by_row` multiplied them."""
    return dq if factor is None else (dq * factor).to(dq.dtype)


# ---- keys and values packed for transfers: a shard's keys, then its values, flat


class PackedKeys:
    """The layout of the keys and values (or their gradients) of any rank in a flat tensor; `own` is one of them."""

    def __init__(self, own: KeyBlock, split: Split) -> None:
        self.split = split
        self._lead = tuple(own.k.shape[:-2])
        self._widths = (own.k.shape[-1], own.v.shape[-1])
        self._token = math.prod(self._lead) * sum(self._widths)

    def numbers(self, rank: int) -> int:
        """Elements of a rank's shard."""
        return self._token * self.split.lengths[rank]

    @property
    def most(self) -> int:
        """Elements of the longest shard."""
        return max(map(self.numbers, range(self.split.world)))

    def pack(self, own: KeyBlock, into: Tensor) -> Tensor:
        """Copies the shard to the first elements of `into`, and returns those."""
        for part, x in zip(self.parts(into, own.k.shape[-2]), (own.k, own.v), strict=True):
            part.copy_(x.detach())
        return into[: own.k.numel() + own.v.numel()]

    def parts(self, flat: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Views of the keys and the values of so many tokens."""
        shapes = [(*self._lead, tokens, width) for width in self._widths]
        first, both = math.prod(shapes[0]), sum(map(math.prod, shapes))
        return flat[:first].view(shapes[0]), flat[first:both].view(shapes[1])

    def block(self, flat: Tensor, rank: int) -> KeyBlock:
        """A rank's shard, for the kernel."""
        k, v = self.parts(flat.cpu(), self.split.lengths[rank])
        return KeyBlock(k, v, self.split.runs[rank])
