"""Hooks on a watched model that find which projections its queries and keys come from.

The first passes show it; every later one is compared with it, because what fitted once may not for ever: an adapter
begins by adding nothing. A compiled graph runs no hook.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from levelhead.remedies import shards
from levelhead.remedies.parts import in_parts
from levelhead.remedies.projections import RanProjection, Source, Sources, Unknown, misfit, outputs, source, torchs_own
from levelhead.remedies.values import also_values
from levelhead.watching.effective_scale import NOT_FOLLOWED
from levelhead.watching.measure import Call
from levelhead.watching.module_stack import WatchedModule

_TRIES = 3  # calls of a module, until what is unknown stays so


class Probe:
    """Attached to a watch until `close`: finds the sources of every module, then compares them with every pass."""

    of_a_watch = True  # copies of the model do not have its hooks

    def __init__(self, watch: Any) -> None:
        self.found: dict[str, Sources] = {}
        self.modules: dict[str, WatchedModule] = {}
        self.misfits: dict[str, Tensor] = {}  # how far the latest passes were from what was found, over what may be
        self._tries: dict[str, int] = {}
        self._ran: dict[nn.Module, tuple[Tensor, int, Tensor | None]] = {}  # since the last attention call
        self._names = {module: name for name, module in watch.model.named_modules()}
        self._watch = watch
        projections = [module for module in watch.model.modules() if outputs(module) is not None]
        self._hooks = [module.register_forward_hook(self._run) for module in projections]
        # What ran behind the last attention call, such as the logits of a vocabulary, is not to stay in memory.
        self._hooks.append(watch.model.register_forward_hook(self._end, always_call=True))
        self._needed: set[nn.Module] | None = None  # once everything is found; None: any projection
        watch.listeners.append(self._called)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._ran = [], {}
        if self._called in self._watch.listeners:
            self._watch.listeners.remove(self._called)

    def _is_settled(self, name: str) -> bool:
        return (name in self.found and self.found[name].known) or self._tries.get(name, 0) >= _TRIES

    def _run(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not isinstance(output, Tensor) or not self._watch.wanted():
            return
        if self._needed is not None and module not in self._needed:
            return
        given = args[0].detach() if args and isinstance(args[0], Tensor) else None
        self._ran[module] = (output.detach(), _version(output), given)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._ran.clear()
        if self._needed is None and self.found and all(map(self._is_settled, self.found)):
            every = (x for found in self.found.values() for x in (found.q, found.k, *(found.parts or ())[2:]))
            self._needed = {x.module for x in every if isinstance(x, Source)}

    def _called(self, watched: WatchedModule, call: Call, tally: Tensor, q: Tensor, k: Tensor) -> None:
        name = watched.name
        if self._is_settled(name):
            self._compare(name, q, k)
        else:
            self._tries[name] = self._tries.get(name, 0) + 1
            self.modules[name] = watched
            unseen = Unknown(NOT_FOLLOWED)
            hidden = call.ready and q is call.q
            sources = Sources(q.shape[1], q.shape[3], unseen, unseen) if hidden else self._sources(watched.module, q, k)
            if name not in self.found or sources.known or not isinstance(self.found[name].q, Source):
                self.found[name] = sources
            self._needed = None
        self._ran.clear()

    def _sources(self, module: nn.Module, q: Tensor, k: Tensor) -> Sources:
        if isinstance(module, nn.MultiheadAttention):
            return Sources(module.num_heads, module.head_dim, *torchs_own(module))
        inside = set(module.modules())
        unchanged = [(child, *ran) for child, ran in self._ran.items() if _version(ran[0]) == ran[1]]
        ran = [RanProjection(self._names.get(child, ""), child, shards.local(out), x) for child, out, _, x in unchanged]
        # Projections may also belong to the module around the one that makes the call.
        ran = [x for x in ran if x.module in inside] or ran
        of_q, of_k = source("q", module, ran, q), source("k", module, ran, k)
        parts = in_parts(module, ran, q, k) if isinstance(of_k, Unknown) else None
        keys = [of_k] if parts is None else [parts.k_own]
        values = also_values(module, ran, of_q if parts is None else parts.q_own, keys)
        return Sources(q.shape[1], q.shape[3], of_q, of_k, parts, values)

    def _compare(self, name: str, q: Tensor, k: Tensor) -> None:
        """How far this pass is from the sources that were found; nothing waits for the device."""
        sources = self.found[name]
        pairs: list[tuple[Source | Unknown, Tensor]] = [(sources.q, q), (sources.k, k)]
        if (parts := sources.parts) is not None:
            pairs = [(parts.q_own, q[..., parts.own]), (parts.q_shared, q[..., parts.shared])]
            pairs.append((parts.k_own, k[..., parts.own]))
        for each, x in pairs:
            ran = self._ran.get(each.module) if isinstance(each, Source) else None
            if isinstance(each, Source) and ran is not None and _version(ran[0]) == ran[1]:
                off = misfit(each, shards.local(ran[0]), x)
                before = self.misfits.get(name)
                self.misfits[name] = off if before is None else torch.maximum(before, off.to(before))


def _version(x: Tensor) -> int:
    """Changes when numbers are overwritten; in inference mode nothing counts that."""
    return 0 if x.is_inference() else x._version
