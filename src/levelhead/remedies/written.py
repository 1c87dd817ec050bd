"""Factors of the rows of parameters, written into this rank's part of each, once however many modules share it.

What was written is compared with what is there at the next step: an optimiser with copies of its own (float32 masters
of bfloat16 weights) overwrites it, and the clip would be lost in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from levelhead.remedies import rows, shards
from levelhead.remedies.agreed import AgreedLayer
from levelhead.remedies.rows import Share

_SAMPLED = 64  # numbers of a parameter that are compared
_CLEAR = 0.98  # factors above are not told apart from rounding and a step's change
_BACK = 0.1  # so near to the old numbers, in units of the change, they came back


class _Write(NamedTuple):
    """Some numbers of a parameter, before and after."""

    layer: str
    name: str
    dim: int
    row: int  # of this rank's part
    old: Tensor
    new: Tensor


class Writes:
    """The factors of one step; `carry_out` writes them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._factors: dict[int, tuple[str, str, int, Tensor]] = {}

    def scale(self, layer: AgreedLayer, factors: Mapping[int, float]) -> None:
        """Rows of these heads get the powers of their factors; a row of several, the smallest."""
        of_shares: dict[Share, dict[int, float]] = {}  # places of heads in them
        for head, factor in factors.items():
            for share, place in layer.shares[head]:
                of_shares.setdefault(share, {})[place] = factor**share.power
        for share, each in of_shares.items():
            parameter = rows.parameter_of(self._model, share.parameter)
            unscaled = torch.ones(parameter.shape[share.dim], dtype=torch.float64)
            whole = self._factors.setdefault(id(parameter), (layer.label, share.parameter, share.dim, unscaled))[-1]
            at = share.rows[list(each)]
            new = torch.tensor(list(each.values()), dtype=torch.float64)[:, None].expand_as(at)
            whole[at] = torch.minimum(whole[at], new)

    def carry_out(self) -> list[_Write]:
        """Writes, and keeps some numbers of what it wrote."""
        kept = []
        with torch.no_grad():
            for layer, name, dim, whole in self._factors.values():
                parameter = rows.parameter_of(self._model, name)
                part = shards.local(parameter.detach())
                factors = whole[shards.rows_here(parameter, dim)].to(part.device)
                at = (factors != 1.0).nonzero()[:, 0]
                if not len(at):  # another rank's
                    continue
                shape = [1] * part.dim()
                shape[dim] = -1
                exact = torch.float32 if part.device.type == "mps" else torch.float64
                old = part.index_select(dim, at)
                new = (old.to(exact) * factors[at].to(exact).reshape(shape)).to(part.dtype)
                part.index_copy_(dim, at, new)
                most = int(factors[at].argmin())
                if float(factors[at[most]]) < _CLEAR:
                    pair = (_sampled(x.select(dim, most)) for x in (old, new))
                    kept.append(_Write(layer, name, dim, int(at[most]), *pair))
        return kept


def _sampled(row: Tensor) -> Tensor:
    flat = row.flatten()
    return flat[:: max(1, len(flat) // _SAMPLED)][:_SAMPLED].double().cpu()


def undone(model: nn.Module, writes: list[_Write]) -> dict[str, bool]:
    """By layer: whether the numbers before the last clip have come back."""
    found: dict[str, bool] = {}
    for write in writes:
        try:
            part = shards.local(rows.parameter_of(model, write.name).detach())
        except (AttributeError, KeyError, AssertionError):  # the model was changed
            continue
        if len(write.old) > 1 and part.shape[write.dim] > write.row:
            now = _sampled(part.select(write.dim, write.row))
            if now.shape == write.old.shape:
                change = torch.linalg.vector_norm(write.new - write.old)
                back = torch.linalg.vector_norm(now - write.old) < _BACK * change
                found[write.layer] = found.get(write.layer, False) or bool(back)
    return found
