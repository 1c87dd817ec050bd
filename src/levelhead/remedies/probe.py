"""Hooks on a watched model that find which projections its queries and keys come from.

The first passes show it; every later one is compared with it, because what fitted once may not for ever: an adapter
begins by adding nothing. A module may attend several times in a run, from other rows each time. What it does at one
place in its code, from one set of projections, is a layer here, and has a name of its own. A compiled graph runs no
hook.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from levelhead.remedies import shards
from levelhead.remedies.parts import in_parts
from levelhead.remedies.passes import Used
from levelhead.remedies.projections import RanProjection, Source, Sources, Unknown, misfit, outputs, source, torchs_own
from levelhead.remedies.values import also_values
from levelhead.watching.effective_scale import NOT_FOLLOWED
from levelhead.watching.measure import Call
from levelhead.watching.module_stack import WatchedModule

_TRIES = 3  # calls of a layer, until what is unknown stays so


class _Output(NamedTuple):
    """What a projection put out, in this run of a module."""

    output: Tensor
    version: int
    input: Tensor | None
    weight: Tensor | None

    @property
    def unchanged(self) -> bool:
        return _version(self.output) == self.version


class Probe:
    """Attached to a watch until `close`: finds the sources of every layer, then compares them with every pass."""

    of_a_watch = True  # copies of the model do not have its hooks

    def __init__(self, watch: Any, then: Callable[..., None] | None = None) -> None:
        self.found: dict[str, Sources] = {}  # by layer
        self.modules: dict[str, WatchedModule] = {}
        self.misfits: dict[str, Tensor] = {}  # how far the latest passes were from what was found, over what may be
        self._then = then  # listens to calls as a watch's listeners do, with the layer and its weights in front
        self._layers: dict[tuple[str, int], list[str]] = {}  # by module and place in its code
        self._tries: dict[str, int] = {}
        self._ran: dict[nn.Module, _Output] = {}  # in this run of a module, or since the last attention call
        self._fresh: set[nn.Module] = set()  # since the last attention call
        self._unseen: Counter[str] = Counter()  # calls of a layer before which no hook ran, in compiled graphs
        self._run_of: tuple[str, int] | None = None  # that call's module, and which run of it
        self._names = {module: name for name, module in watch.model.named_modules()}
        self._watch = watch
        projections = [module for module in watch.model.modules() if outputs(module) is not None]
        self._hooks = [module.register_forward_hook(self._run) for module in projections]
        # What ran behind the last attention call, such as the logits of a vocabulary, is not to stay in memory.
        self._hooks.append(watch.model.register_forward_hook(self._end, always_call=True))
        self._known: set[nn.Module] = set()  # projections that ran
        self._unneeded: set[nn.Module] = set()  # those of them that are no source, once everything is found
        watch.listeners.append(self._called)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._forget()
        if self._called in self._watch.listeners:
            self._watch.listeners.remove(self._called)

    def _forget(self) -> None:
        self._ran.clear()
        self._fresh.clear()

    def _is_settled(self, layer: str) -> bool:
        return (layer in self.found and self.found[layer].known) or self._tries.get(layer, 0) >= _TRIES

    def _run(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not isinstance(output, Tensor) or not self._watch.wanted():
            return
        if module in self._unneeded:
            return
        given = args[0].detach() if args and isinstance(args[0], Tensor) else None
        self._ran[module] = _Output(output.detach(), _version(output), given, module._parameters.get("weight"))
        self._fresh.add(module)
        self._known.add(module)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._forget()
        if not self._unneeded and self.found and all(map(self._is_settled, self.found)):
            sources = {x.module for found in self.found.values() for x in _each(found)}
            self._unneeded = self._known - sources  # a layer that has not run yet keeps its projections

    def _called(self, watched: WatchedModule, call: Call, tally: Tensor, q: Tensor, k: Tensor) -> None:
        if self._fresh and self._run_of != (watched.name, watched.runs):  # what another module had is over
            self._ran = {module: ran for module, ran in self._ran.items() if module in self._fresh}
        hidden = call.ready and q is call.q
        layer = self._layer(watched, call, q, k)
        if self._is_settled(layer):
            self._compare(layer, q, k)
        else:
            self._tries[layer] = self._tries.get(layer, 0) + 1
            self.modules[layer] = watched
            unseen = Unknown(NOT_FOLLOWED)
            sources = Sources(q.shape[1], q.shape[3], unseen, unseen) if hidden else self._sources(watched.module, q, k)
            if layer not in self.found or sources.known or not isinstance(self.found[layer].q, Source):
                self.found[layer] = sources
            self._unneeded = set()
        used = self._used(layer)
        self._fresh.clear()
        self._run_of = watched.name, watched.runs
        if self._then is not None:
            self._then(layer, used, watched, call, tally, q, k)

    def _used(self, layer: str) -> list[Used]:
        """The weights that this call's queries and keys came from; where that is not known, all that ran for it."""
        found = self.found.get(layer)
        of = [(x.module, x.weight) for x in _each(found)] if found is not None else []
        used = []
        for module, name in of or [(module, "weight") for module in self._fresh]:
            ran = self._ran.get(module)  # in a compiled graph no hook ran: the weights that are in their place
            weight = ran.weight if ran is not None and name == "weight" else module._parameters.get(name)
            if weight is not None:
                used.append(Used(module, name, weight))
        return used

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Passes in this block do not count as passes of the step."""
        before = dict(self.misfits), Counter(self._unseen)
        try:
            yield
        finally:
            self.misfits, self._unseen = before

    # ---- which layer a call is

    def _layer(self, watched: WatchedModule, call: Call, q: Tensor, k: Tensor) -> str:
        """By the place in the module's code, and there by the projections that ran for it."""
        first = watched.name + (f" (call {call.place})" if call.place > 1 else "")
        layers = self._layers.setdefault((watched.name, call.place), [first])
        if first not in self.found or isinstance(watched.module, nn.MultiheadAttention):
            return first
        for ran in (self._fresh, self._ran.keys()):
            if (layer := next((x for x in layers if self._fed_by(x, ran)), None)) is not None:
                return layer
            if self._fresh and ran is self._fresh:
                q_or_k = [x for x in _each(self._sources(watched.module, q, k, ran)) if isinstance(x, Source)]
                if q_or_k:
                    layers.append(f"{first} ({self._names.get(q_or_k[0].module, '')})")
                    return layers[-1]
        if len(layers) > 1 or self._ran:  # it may be any of them, or none
            self._lose(first, q.device)
        self._unseen[first] += 1
        return first

    def _lose(self, layer: str, device: torch.device) -> None:
        self.misfits[layer] = torch.full((), math.inf, dtype=torch.float64, device=device)

    def end_step(self) -> None:
        """Graphs number places anew after a break. So a module with several layers needs as many calls of each."""
        of_modules: dict[str, list[str]] = {}
        for (name, _), layers in self._layers.items():
            of_modules.setdefault(name, []).extend(layers)
        for layers in of_modules.values():
            if len({self._unseen[layer] for layer in layers}) > 1:
                self._lose(layers[0], torch.device("cpu"))
        self._unseen.clear()

    def _fed_by(self, layer: str, ran: Any) -> bool:
        """Whether projections of a layer are among those that ran; also where none is known."""
        modules = {x.module for x in _each(self.found[layer])}
        return not modules or any(module in ran for module in modules)

    def _sources(self, module: nn.Module, q: Tensor, k: Tensor, of: Any = None) -> Sources:
        """Where q and k come from, as far as the projections `of` show; None: the newest, else all of this run."""
        if isinstance(module, nn.MultiheadAttention):
            return Sources(module.num_heads, module.head_dim, *torchs_own(module))
        if of is None:
            newest = self._sources(module, q, k, self._fresh)
            return newest if newest.known or self._ran.keys() == self._fresh else self._sources(module, q, k, self._ran)
        inside = set(module.modules())
        unchanged = [(child, self._ran[child]) for child in self._ran if child in of and self._ran[child].unchanged]
        ran = [
            RanProjection(self._names.get(child, ""), child, shards.local(one.output), one.input)
            for child, one in unchanged
        ]
        # Projections may also belong to the module around the one that makes the call.
        ran = [x for x in ran if x.module in inside] or ran
        of_q, of_k = source("q", module, ran, q), source("k", module, ran, k)
        parts = in_parts(module, ran, q, k) if isinstance(of_k, Unknown) else None
        keys = [of_k] if parts is None else [parts.k_own]
        values = also_values(module, ran, of_q if parts is None else parts.q_own, keys)
        return Sources(q.shape[1], q.shape[3], of_q, of_k, parts, values)

    def _compare(self, layer: str, q: Tensor, k: Tensor) -> None:
        """How far this pass is from the sources that were found; nothing waits for the device."""
        sources = self.found[layer]
        pairs: list[tuple[Source | Unknown, Tensor]] = [(sources.q, q), (sources.k, k)]
        if (parts := sources.parts) is not None:
            pairs = [(parts.q_own, q[..., parts.own]), (parts.q_shared, q[..., parts.shared])]
            pairs.append((parts.k_own, k[..., parts.own]))
        for each, x in pairs:
            ran = self._ran.get(each.module) if isinstance(each, Source) else None
            if isinstance(each, Source) and ran is not None and ran.unchanged:
                off = misfit(each, shards.local(ran.output), x)
                before = self.misfits.get(layer)
                self.misfits[layer] = off if before is None else torch.maximum(before, off.to(before))


def _each(sources: Sources) -> Iterator[Source]:
    """The sources that are known."""
    every = (sources.q, sources.k, *(sources.parts or ())[2:])
    return (x for x in every if isinstance(x, Source))


def _version(x: Tensor) -> int:
    """Changes when numbers are overwritten; in inference mode nothing counts that."""
    return 0 if x.is_inference() else x._version
