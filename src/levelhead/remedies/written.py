"""Factors of the rows of parameters, written into this rank's part of each, once however many modules share it.

What was written is compared with what is there at the next step: an optimiser with copies of its own (float32 masters
of bfloat16 weights) overwrites it, and the clip would be lost in silence. Numbers alone do not show that: where logits
grow steadily, each step adds again what a clip took. So a parameter that its optimiser changes in place is not suspect,
unless the optimiser's state has a copy with the numbers from before the clip.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

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
    parameter: Tensor
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
                new = _rounded(old.to(exact) * factors[at].to(exact).reshape(shape), part.dtype)
                part.index_copy_(dim, at, new)
                most = int(factors[at].argmin())
                if float(factors[at[most]]) < _CLEAR:
                    pair = (_sampled(x.select(dim, most)) for x in (old, new))
                    kept.append(_Write(layer, name, parameter, dim, int(at[most]), *pair))
        return kept


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in a dtype; in half precision towards zero, as a factor near 1 would else change nothing, step after step."""
    near = x.to(dtype)
    if dtype.itemsize != 2:
        return near
    return torch.where(near.to(x.dtype).abs() > x.abs(), near.view(torch.int16) - 1, near.view(torch.int16)).view(dtype)


def _sampled(row: Tensor) -> Tensor:
    flat = row.flatten()
    return flat[:: max(1, len(flat) // _SAMPLED)][:_SAMPLED].double().cpu()


class Kept:
    """What the last step wrote, until the next one asks whether it is still there."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._writes: list[_Write] = []
        self._in_place: set[int] = set()  # parameters that an optimiser has, and no copy of
        called = weakref.WeakMethod(self._before_a_step)  # a hook of all optimisers must not keep the model alive

        def hook(*given: Any) -> None:
            if (before := called()) is not None:
                before(*given)

        self.close = weakref.finalize(self, register_optimizer_step_pre_hook(hook).remove)

    def keep(self, writes: Sequence[_Write]) -> None:
        self._writes, self._in_place = list(writes), set()

    def _before_a_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._writes:
            return
        held = {id(x) for group in optimizer.param_groups for x in group["params"]}
        for write in self._writes:
            if id(write.parameter) in held:
                state = optimizer.state.get(write.parameter, {})
                copies = (x for x in state.values() if isinstance(x, Tensor) and x.shape == write.parameter.shape)
                if not any(_is_back(write, copy) for copy in copies):
                    self._in_place.add(id(write.parameter))

    def undone(self) -> dict[str, bool]:
        """By layer: whether something has put back the numbers from before the last clip."""
        found: dict[str, bool] = {}
        for write in self._writes:
            try:
                parameter = rows.parameter_of(self._model, write.name)
            except (AttributeError, KeyError, AssertionError):  # the model was changed
                continue
            back = id(write.parameter) not in self._in_place and _is_back(write, parameter)
            found[write.layer] = found.get(write.layer, False) or back
        return found


def _is_back(write: _Write, x: Tensor) -> bool:
    """Whether x has the numbers from before a clip."""
    part = shards.local(x.detach())
    if len(write.old) < 2 or part.shape[write.dim] <= write.row:
        return False
    now = _sampled(part.select(write.dim, write.row))
    if now.shape != write.old.shape:
        return False
    change = torch.linalg.vector_norm(write.new - write.old)
    return bool(torch.linalg.vector_norm(now - write.old) < _BACK * change)
