"""What all remedies share: they can be undone, and they can be proved to be in force.

A proof runs the model on a batch under a watch and checks what reached the softmax of every remedied module; a module
that was not observed is not proved. Each remedy defines what it changes and what its proof must find.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from levelhead import checks
from levelhead.errors import LevelheadValueError, bad_type, bad_value, expected
from levelhead.remedies import shards
from levelhead.runs.record import Record
from levelhead.torch.huggingface.survey import attending_modules
from levelhead.torch.nn import MultiHeadAttention
from levelhead.watching.measure import Call
from levelhead.watching.module_stack import WatchedModule
from levelhead.watching.watch import Watch
from levelhead.watching.watchable import clean, sounds_like_attention, unwrapped


class NotInForceError(LevelheadValueError):
    """A remedy that does not do what it should, in the modules that the message names."""


@dataclass(frozen=True)
class Verified:
    """A remedy was found in force: in which modules, and what was seen there."""

    remedy: str
    modules: Mapping[str, str]  # name -> what reached the softmax
    note: str = ""

    def __str__(self) -> str:
        lines = [f"{self.remedy}: in force in {len(self.modules)} modules", listed(self.modules)]
        return "\n".join([*lines, *([f"  {self.note}"] if self.note else [])])


@dataclass
class Sight:
    """What one module did with a batch."""

    calls: list[tuple[Call, Tensor, Tensor, Tensor]] = field(default_factory=list)
    record: Record | None = None


class Remedy(AbstractContextManager[Any]):
    """Holds until `undo()`, or the end of the `with`."""

    def __init__(self, model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
        self.model, self.modules, self.active = model, dict(modules), True

    def undo(self) -> None:
        """Puts everything back as it was; a second time does nothing."""
        if self.active:
            self.active = False
            self._undo()

    def verify(self, batch: Any) -> Verified:
        """Runs the model on a batch and proves that the remedy is in force, or raises.

        Args:
            batch: what the model is called with: a tensor, a tuple of arguments, or a dictionary of keywords. The model
                runs as in evaluation, without gradients.

        Raises:
            NotInForceError: with the names of the modules where it is not, and what was seen.
        """
        with self._watched() as watch:
            seen = sights(self.model, batch, watch)
        unseen = "no attention call was seen"
        whys = {name: self._wrong(name, seen[name]) if name in seen else unseen for name in self.modules}
        wrong = {name: why for name, why in whys.items() if why is not None}
        if wrong or not self.modules:
            given = f"{len(wrong)} of {len(self.modules)} where it is not:\n{listed(wrong)}\n"
            raise NotInForceError(expected(repr(self), "to be in force", given, self._advice))
        return Verified(self._name, {name: self._evidence(name, seen[name]) for name in self.modules})

    # ---- what each remedy defines

    _advice = "Something between the remedy and the softmax goes around it"
    _name = "remedy"

    @contextmanager
    def _watched(self) -> Iterator[Watch]:
        with Watch(self.model, deep=depth(self.model), rows=None) as watch:
            yield watch

    def _undo(self) -> None:
        raise NotImplementedError

    def _wrong(self, name: str, sight: Sight) -> str | None:
        raise NotImplementedError

    def _evidence(self, name: str, sight: Sight) -> str:
        raise NotImplementedError

    def __exit__(self, *error: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        state = "" if self.active else ", undone"
        kind = type(unwrapped(self.model)).__name__
        return f"{self._name} of {kind}: {len(self.modules)} modules{state}"


# ---- the model, and a run of it


def checked(model: Any) -> nn.Module:
    """The model, if it is one."""
    if not isinstance(model, nn.Module):
        advice = "Give the model itself, not its name or its outputs"
        raise bad_type("model", "a torch.nn.Module", type(model).__name__, advice)
    return model


def positive(name: str, value: Any, advice: str) -> float:
    """A finite number above 0."""
    return checks.number(name, value, "a finite number above 0", advice, lambda x: x > 0)


def listed(modules: Mapping[str, str]) -> str:
    """A line for each module."""
    return "\n".join(f"  {name or '(the model)'}: {words}" for name, words in modules.items())


def no_attention(model: nn.Module) -> LevelheadValueError:
    advice = "Is it the model that attends, on this side of any wrapper"
    return bad_value("model", "modules that attend", f"none in {type(unwrapped(model)).__name__}", advice)


def refuse_without_attention(model: nn.Module) -> None:
    """An error unless a module attends, by its code or by its name."""
    inner = unwrapped(model)
    if not any(attending_modules(inner, held=True)) and not any(map(sounds_like_attention, inner.modules())):
        raise no_attention(model)


def depth(model: nn.Module) -> bool | None:
    """How deep a watch of it looks. True where only a dispatch mode sees some of its attention, or may: code for both
    may run either. Else None: the watch itself looks for attention whose class does not say that it is one."""
    found = any(
        one.by_hand and not one.interface and (not one.sdpa or implementation(one.module) in (None, "eager"))
        for one in attending_modules(unwrapped(model))
        if not isinstance(one.module, (nn.MultiheadAttention, MultiHeadAttention))
    )
    return True if found else None


def implementation(module: nn.Module) -> str | None:
    """What a module of transformers is set to; None: it does not say."""
    found: str | None = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return found


def run(model: nn.Module, batch: Any) -> Any:
    """The model on a batch, as in evaluation; its modes and the random numbers stay as they are."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            if isinstance(batch, Mapping):
                return model(**batch)
            return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    finally:
        for module, training in modes.items():
            module.training = training
        shards.resharded(model)  # no backward pass follows, after which FSDP2 would do it


def uncompiled() -> AbstractContextManager[Any]:
    """Compiled models run as they were written, while the block runs."""
    stance = getattr(torch.compiler, "set_stance", None)  # since torch 2.6
    return nullcontext() if stance is None else stance("force_eager")


def sights(model: nn.Module, batch: Any, watch: Watch) -> dict[str, Sight]:
    """What every attention module of a watched model did with a batch."""
    seen: dict[str, Sight] = {}

    def listen(watched: WatchedModule, call: Call, tally: Tensor, q: Tensor, k: Tensor) -> None:
        seen.setdefault(watched.name, Sight()).calls.append((call, tally, q, k))

    watch.listeners.append(listen)
    try:
        run(model, batch)
    finally:
        watch.listeners.remove(listen)
    for record in watch.last.records:
        if sight := seen.get(clean(record.module.split(" (")[0])):
            sight.record = record
    return seen
