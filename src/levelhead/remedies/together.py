"""What ranks tell each other in a step of QK-clip: the largest logit of every head, in one collective.

The first step, and one in which a rank has seen something new, agrees on the heads first (`agreed`). Every rank takes
part in every step, also one that ran no pass, so none waits for another. Alone, this is the same without collectives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from levelhead.errors import bad_value
from levelhead.remedies import rows
from levelhead.remedies.agreed import DIFFERENT, LOST, NOTHING_RAN, AgreedLayer, Described, Processes, Rank, agree
from levelhead.remedies.passes import Maxima

_FLAGS = ("bad_rows", "misfit", "biased", "undone")  # of a layer, beside its heads' maxima


class Exchanged(NamedTuple):
    """What all ranks know after a step's collective."""

    idle: tuple[int, ...]  # ranks without a pass
    flags: dict[str, dict[str, float]]  # by label of the layer
    maxima: dict[str, dict[int, float]]  # by label and head


class Together:
    """The ranks of a group, or this process alone."""

    def __init__(self, model: nn.Module, group: Any, parts: str | None) -> None:
        self.model, self.group, self.parts = model, Processes(group), parts
        self.layers: list[AgreedLayer] | None = None  # that ranks agreed on
        self._heads: dict[str, tuple[int, ...]] = {}  # of this rank, by module
        self._agreed_on: tuple[Any, ...] = ()  # the layers of this rank, at that time

    def exchanged(
        self,
        seen: Mapping[str, Maxima],
        own: tuple[Described, ...],
        wrong: str,
        misfits: Mapping[str, Tensor],
        undone: Mapping[str, bool],
        tau: float,
    ) -> Exchanged:
        """The numbers of all ranks, or the same error on each."""
        numbers = [1.0] if self.layers is None else self._largest(seen, own, misfits, undone, tau)
        if numbers[0]:  # the first step, or a rank has seen something new
            self.agree(seen, own, wrong)
            numbers = self._largest(seen, own, misfits, undone, tau)
        assert self.layers is not None
        values = iter(numbers[1:])
        most, least = next(values), -next(values)
        if most != least:
            raise bad_value(
                "tau", "the same on every rank", f"{least:.6g} to {most:.6g}", "Make QKClip alike everywhere"
            )
        idle = tuple(place for place in range(self.group.world) if next(values))
        flags = {layer.label: {name: next(values) for name in _FLAGS} for layer in self.layers}
        maxima = {layer.label: {head: next(values) for head in layer.heads} for layer in self.layers}
        return Exchanged(idle, flags, maxima)

    def agree(self, seen: Mapping[str, Maxima], own: tuple[Described, ...], wrong: str) -> None:
        """Sends the other ranks what this one knows, or why it cannot clip at all."""
        wrong = wrong or ("" if own else NOTHING_RAN)
        if lost := [name for name, one in seen.items() if one.bad_rows]:
            wrong = f"{LOST}{', '.join(map(repr, lost))}"
        rank = Rank(self.group.number, self.parts, tuple(map(self._as_it_is_now, own)), wrong)
        self.layers, self._heads = agree(self.group, self.model, rank)
        self._agreed_on = tuple(each.key for each in own)
        if self.layers and all(layer.frozen for layer in self.layers):
            advice = "Make QKClip for the model whose q and k projections are trained"
            raise bad_value("model", "trained q or k projections", self.layers[0].why, advice)

    def _as_it_is_now(self, each: Described) -> Described:
        names = sorted({share.parameter for share in each.shares})
        holders, found = rows.fingerprint(self.model, names)
        keys = rows.key_prints(self.model, each.keys) if self.group.several else frozenset[int]()
        return replace(each, holders=holders, fingerprint=found, key_prints=keys)

    def _largest(
        self,
        seen: Mapping[str, Maxima],
        own: tuple[Described, ...],
        misfits: Mapping[str, Tensor],
        undone: Mapping[str, bool],
        tau: float,
    ) -> list[float]:
        """One collective, one wait for the device."""
        new = tuple(each.key for each in own) != self._agreed_on and bool(seen)
        idle = [float(not seen and place == self.group.place) for place in range(self.group.world)]
        device = next((one.largest.device for one in seen.values()), torch.device("cpu"))
        exact = torch.float32 if device.type == "mps" else torch.float64
        pieces = [torch.tensor([float(new), tau, -tau, *idle], dtype=exact, device=device)]
        maxima = []
        for layer in self.layers or ():
            mine = seen.get(layer.module) if self.group.number in layer.members else None
            flags = torch.zeros(len(_FLAGS), dtype=exact, device=device)
            largest = torch.full((len(layer.heads),), -math.inf, dtype=exact, device=device)
            if mine is not None:
                flags[0], flags[2] = mine.bad_rows, mine.biased
                if (off := misfits.get(layer.module)) is not None:
                    flags[1] = off
                places = {head: place for place, head in enumerate(layer.heads)}
                heads = self._heads.get(layer.module, ())
                if len(heads) == len(mine.largest) and all(head in places for head in heads):
                    largest[[places[head] for head in heads]] = mine.largest.to(exact)
            flags[3] = float(undone.get(layer.label, False))
            pieces.append(flags)
            maxima.append(largest)
        return self.group.largest(torch.cat([*pieces, *maxima]))

    def same_bits(self, layers: Sequence[AgreedLayer]) -> bool:
        """Whether ranks that clip a layer alike still hold the same: stages may have begun with equal numbers. If not,
        they have to agree again, or the ranks are refused."""
        if not self.group.several or self.parts == "replicas":
            return True
        numbers: list[float] = []
        for layer in layers:
            holders: tuple[int, ...] = ()
            found, mine = 0, self.group.number in layer.members
            if mine and layer.parameters:
                holders, found = rows.fingerprint(self.model, list(layer.parameters))
            place = holders.index(self.group.number) if self.group.number in holders else 0
            for n in range(max(1, len(layer.members))):  # parts of one parameter differ, copies of a part do not
                here = mine and n == place
                numbers += [float(found), -float(found)] if here else [-math.inf, -math.inf]
        most = iter(self.group.largest(torch.tensor(numbers, dtype=torch.float64)))
        same = all(high == -low or high == -math.inf for high, low in zip(most, most, strict=True))
        if not same and self.parts is None:
            names = ", ".join(repr(layer.label) for layer in layers)
            raise bad_value("ranks", "one layer by one name", f"{names}, with other parameters on some", DIFFERENT)
        if not same:
            self.layers = None
        return same
