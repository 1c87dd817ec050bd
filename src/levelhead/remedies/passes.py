"""What calls have come to since the last step of a clip, as far as they ran with the weights that it writes.

`torch.func.functional_call` puts other weights in the place of a module's own while it runs: a teacher's, or those of
an inner loop. Their logits say nothing about the module's own. FSDP2 puts whole copies there, which do count. So calls
with weights that were not there in the last step are kept apart, and decided in the next one, when every parameter is
in its place again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from levelhead.remedies import shards


@dataclass
class Maxima:
    """What a module's calls have come to since the last step; read once, then."""

    largest: Tensor  # (H,)
    bad_rows: Tensor
    biased: Tensor
    cap: float | None  # of its logits

    def after(self, old: Maxima | None) -> Maxima:
        """With those of earlier calls; not with calls of other heads."""
        if old is None or old.largest.shape != self.largest.shape:
            return self
        largest = torch.maximum(old.largest, self.largest)
        return Maxima(largest, old.bad_rows + self.bad_rows, old.biased | self.biased, self.cap)


class Used(NamedTuple):
    """The weight that a projection ran with."""

    module: nn.Module
    name: str
    weight: Tensor


class _Apart:
    """Calls of a layer with other weights than those of the last step; they may be gone by the next."""

    def __init__(self, used: Iterable[Used], maxima: Maxima) -> None:
        self.used = [(module, name, weakref.ref(weight)) for module, name, weight in used]
        self.maxima = maxima

    def ran_with(self, used: list[Used]) -> bool:
        pairs = zip(self.used, used, strict=False)
        return len(self.used) == len(used) and all(kept() is one.weight for (_, _, kept), one in pairs)

    @property
    def alive(self) -> bool:
        return all(kept() is not None for _, _, kept in self.used)


class Passes:
    """The calls since the last step, by layer."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        every = ((x, name, own) for x in model.modules() for name, own in x._parameters.items())
        self._own = {(x, name): weakref.ref(own) for x, name, own in every if own is not None}
        self._counted: dict[str, Maxima] = {}
        self._apart: dict[str, list[_Apart]] = {}

    def add(self, layer: str, used: list[Used], new: Maxima) -> None:
        """A call, with the weights that its queries and keys came from."""
        if all(map(self._is_known, used)):
            self._counted[layer] = new.after(self._counted.get(layer))
            return
        those = self._apart.setdefault(layer, [])
        same = next((x for x in those if x.ran_with(used)), None)
        if same is not None:
            same.maxima = new.after(same.maxima)
        else:  # weights that are gone will not be written, and do not pile up
            self._apart[layer] = [x for x in those if x.alive] + [_Apart(used, new)]

    def _is_known(self, used: Used) -> bool:
        kept = self._own.get((used.module, used.name))
        own = None if kept is None else kept()
        return own is not None and (used.weight is own or _same_memory(used.weight, own))

    def taken(self) -> tuple[dict[str, Maxima], list[str]]:
        """What calls with the model's own weights came to, and the layers that ran with others alone. Ends the step."""
        found, apart = self._counted, self._apart
        self._counted, self._apart = {}, {}
        whole = shards.whole_copies(self._model) if apart else {}
        for layer, those in apart.items():
            for each in those:
                if all(self._is_own(module, name, kept(), whole) for module, name, kept in each.used):
                    found[layer] = each.maxima.after(found.get(layer))
        return found, [layer for layer in apart if layer not in found]

    def _is_own(self, module: nn.Module, name: str, weight: Tensor | None, whole: dict[int, Tensor]) -> bool:
        registered = module._parameters.get(name)
        if registered is None or weight is None:
            return False
        self._own[module, name] = weakref.ref(registered)  # it may have been replaced
        return weight is registered or whole.get(id(registered)) is weight

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Calls in this block do not count."""
        before = self._counted, self._apart
        self._counted, self._apart = {}, {}
        try:
            yield
        finally:
            self._counted, self._apart = before


def _same_memory(x: Tensor, own: Tensor) -> bool:
    """Whether both are the same numbers: `detach()` makes another tensor of them."""
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return False
    x, own = shards.local(x.detach()), shards.local(own.detach())
    same = x.shape == own.shape and x.stride() == own.stride() and x.dtype == own.dtype and x.device == own.device
    return same and x.data_ptr() == own.data_ptr() != 0
