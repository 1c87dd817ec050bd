"""The gains of QK-norm are trained, and alike on every rank, or it is said.

DistributedDataParallel and FSDP take their parameters when they wrap a model: gains that come later are in no
reduction, and ranks drift apart in silence. So wrapped models are refused. An optimiser takes its parameters when it is
made: the first step of one that has the projections and not the gains raises. The same step, or a forward pass before,
shows projections that are split over ranks by heads beside gains that are not: each rank would train its gains by its
own heads.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from levelhead.errors import LevelheadValueError, bad_type, bad_value
from levelhead.remedies import shards
from levelhead.remedies.projections import Source, Sources

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")


def refuse_unless_reduced(model: nn.Module) -> None:
    """An error if something has taken the model's parameters already to reduce their gradients over ranks."""
    for module in model.modules():
        kind = type(module).__name__
        if kind in _WRAPPERS:
            raise _too_late(kind)
        if hasattr(module, "_get_fsdp_state"):
            raise _too_late("fully_shard")
        if any(shards.is_sharded(x) for x in module._parameters.values()):
            raise _too_late("parallelize_module")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        inside = set(model.modules())
        for wrapper in gc.get_objects():  # a wrapper knows its model, and not the other way round
            if isinstance(wrapper, nn.parallel.DistributedDataParallel) and inside & set(wrapper.modules()):
                raise _too_late("DistributedDataParallel")


def _too_late(what: str) -> LevelheadValueError:
    given = f"one that {what} has taken: gains that are added now are in no reduction, and ranks would drift apart"
    return bad_value("model", "a model that is not distributed yet", given, f"Call qk_norm before {what}")


def beside_parts(gains: str) -> LevelheadValueError:
    """A tensor parallel plan came after `qk_norm`, and does not have the gains."""
    given = f"{gains} beside projections in parts over ranks"
    advice = "Put q_norm and k_norm into the plan, as SequenceParallel(sequence_dim=2)"
    return bad_value("model", "gains that are reduced over ranks", given, advice)


class Trained:
    """Looks at the first steps of optimisers, until one trains the gains."""

    def __init__(self, modules: Mapping[str, nn.Module], sources: Mapping[str, Sources]) -> None:
        self._modules, self._sources = modules, sources
        self._hook: Any = register_optimizer_step_pre_hook(self._before_a_step)

    def close(self) -> None:
        self._hook.remove()

    def join(self, optimizer: Any) -> None:
        """Adds the gains to an optimiser, in the groups' options of the projections."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            advice = "Pass the optimiser that has the model's parameters"
            raise bad_type("optimizer", "a torch.optim.Optimizer", type(optimizer).__name__, advice)
        held = {id(x): group for group in optimizer.param_groups for x in group["params"]}
        new = [x for x in self._gains() if id(x) not in held]
        groups = [held[id(x)] for x in self._projections() if id(x) in held]
        if not groups or isinstance(optimizer, getattr(torch.optim, "Muon", ())):
            given = f"{type(optimizer).__name__}, which does not" if not groups else "Muon, which takes matrices only"
            advice = "Make an optimiser for the gains: parameters whose names end in q_norm.weight and k_norm.weight"
            raise bad_value("optimizer", "one that trains the q and k projections and takes vectors", given, advice)
        options = {name: x for name, x in groups[0].items() if name not in ("params", "param_names")}
        if new:
            optimizer.add_param_group({**options, "params": new, "weight_decay": 0.0})

    def _gains(self) -> Iterator[nn.Parameter]:
        for module in self._modules.values():
            for name in ("q_norm", "k_norm"):
                norm: Any = module._modules[name]  # an attribute of that name may be None, and is the model's own
                yield norm.weight

    def _projections(self) -> Iterator[nn.Parameter]:
        for sources in self._sources.values():
            for each in (sources.q, sources.k):
                weight = each.module._parameters.get(each.weight) if isinstance(each, Source) else None
                if weight is not None:
                    yield weight

    def _before_a_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        held = {id(x) for group in optimizer.param_groups for x in group["params"]}
        name = next(iter(self._modules))
        if any(id(x) in held for x in self._gains()):
            self._refuse_split(name)
            self.close()
        elif any(id(x) in held and x.dim() > 1 for x in self._projections()) and not _matrices_only(optimizer):
            given = f"{type(optimizer).__name__}, which trains the projections of {name or 'the model'!r} and no gain"
            advice = "Make the optimiser after qk_norm, or pass qk_norm(..., optimizer=optimizer)"
            raise bad_value("optimizer", "one that has the gains of qk_norm", given, advice)

    def _refuse_split(self, name: str) -> None:
        whole = any(not shards.is_sharded(x) for x in self._gains())
        split = next((x for x in self._projections() if shards.is_sharded(x)), None)
        if whole and split is not None:
            raise beside_parts(f"q_norm and k_norm of {name or 'the model'!r}")


def _matrices_only(optimizer: Any) -> bool:
    """Whether an optimiser leaves vectors to another one, as Muon does."""
    return all(x.dim() == 2 for group in optimizer.param_groups for x in group["params"])
