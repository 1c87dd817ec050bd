"""What a watched JAX model leaves: a pytree that jit, grad and vmap return, and a `Run` once its numbers are known.

Of every call it holds the tally of its heads and, for the effective scale, some tokens of queries, keys and the layers
before them. The scale is found on the host, from numbers, as for PyTorch (`watching.origins`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import numpy as np

from levelhead.errors import bad_value
from levelhead.runs import tally
from levelhead.runs.record import Facts, Record, Run, Snapshot
from levelhead.runs.record import Seen as Line
from levelhead.watching import origins
from levelhead.watching.scale_sides import Reading, Side, combined, judged

NOTHING_RAN = "no layer ran before the call"


class Layer(NamedTuple):
    """A layer that ran before a call."""

    name: str
    norm: bool
    reads: int | None
    tokens: int


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class Call:
    """One attention call."""

    tally: Any  # (H, columns)
    q: Any  # (tokens, H, D), sampled
    k: Any  # (tokens, G, D)
    outputs: tuple[Any, ...]  # (tokens, F) of each layer, at the same tokens
    scale: Any  # one number or one per head, where it is an array
    module: str = field(metadata={"static": True})
    facts: Facts = field(metadata={"static": True})
    layers: tuple[Layer, ...] = field(metadata={"static": True})
    tokens: tuple[int, int] = field(metadata={"static": True})  # of queries and keys
    heads: int = field(metadata={"static": True})

    def record(self) -> Record:
        """With its scale; of a call that was mapped, all elements together."""
        tallies = np.asarray(self.tally, np.float64)
        if tallies.shape[-2] != self.heads:  # shards side by side, as if each had heads of its own
            advice = "From shard_map return jax.tree.map(lambda x: x[None], seen); see Coming from JAX"
            raise bad_value("seen", f"{self.heads} heads, as the call had", tallies.shape[-2], advice)
        parts = list(tallies.reshape(-1, *tallies.shape[-2:]))
        mapped = tallies.ndim - 2
        reading = self._reading(mapped)
        facts = replace(
            self.facts,
            effective_scale=reading.scale,
            scale_reading=reading.how,
            model_width=reading.width,
            effective_scales=reading.each,
        )
        return Record(self.module, facts, reduce(tally.merge, parts))

    def _reading(self, mapped: int) -> Reading:
        if not self.layers:
            return Reading(None, NOTHING_RAN)
        q, k = (_over_elements(x, mapped) for x in (self.q, self.k))
        outputs = [_over_elements(x, mapped) for x in self.outputs]
        sides = []
        for name, heads, tokens in zip(("queries", "keys"), (q, k), self.tokens, strict=True):
            used = [n for n, layer in enumerate(self.layers) if layer.tokens == tokens]
            layers, there = [self.layers[n] for n in used], [outputs[n] for n in used]
            if not layers:
                sides.append(Side(f"no layer before the call has the tokens of the {name}"))
                continue
            sides.append(judged(name, heads, layers, there, origins.find(heads, there)))
        scale = self.facts.scale if self.scale is None else self.scale
        passed = None if scale is None else np.asarray(scale, np.float64).reshape(-1)
        return combined(sides[0], sides[1], passed, q.shape[1])


def _over_elements(x: Any, mapped: int) -> Any:
    """(elements ..., tokens, ...) with all tokens in one axis, in double."""
    numbers = np.asarray(x).astype(np.float64)
    return numbers.reshape(-1, *numbers.shape[mapped + 1 :])


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class Seen:
    """The calls of one pass, in their order. `levelhead.diagnose` takes it as it is."""

    calls: tuple[Call, ...]
    model: str = field(metadata={"static": True})

    def snapshot(self, step: int = 0) -> Snapshot:
        """For a sink; calls of one module at several places are records of their own."""
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(self.calls)):
            advice = "Return it from the jitted function, and read it outside"
            raise bad_value("snapshot", "arrays whose numbers are known", "traced arrays", advice)
        records, times = [], dict[str, int]()
        for call in self.calls:
            times[call.module] = times.get(call.module, 0) + 1
            record, n = call.record(), times[call.module]
            records.append(record if n == 1 else replace(record, module=f"{record.module} ({n})"))
        return Snapshot(step, tuple(records))

    def run(self) -> Run:
        """As `levelhead.diagnose`, `save` and the reports take it."""
        return run({0: self})

    def _repr_html_(self) -> str:
        return self.run()._repr_html_()


def run(steps: Mapping[int, Seen] | Iterable[Seen], *, expected_scale: float | str | None = None) -> Run:
    """Everything that was seen as one `Run`: by step, or in order from step 0 on."""
    seen = dict(steps) if isinstance(steps, Mapping) else dict(enumerate(steps))
    snapshots = tuple(one.snapshot(step) for step, one in sorted(seen.items()))
    calls: dict[str, list[Call]] = {}
    for one in seen.values():
        for call in one.calls:
            calls.setdefault(call.module, []).append(call)
    coverage = tuple(Line(name, x[0].facts.kind, True, x[0].facts.how, len(x)) for name, x in calls.items())
    model = next((one.model for one in seen.values()), "")
    return Run(model, snapshots, coverage, expected_scale=expected_scale)
