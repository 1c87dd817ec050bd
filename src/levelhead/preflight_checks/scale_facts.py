"""A correction of what a watch reads of scales: a parameter that is the scale only by chance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor, nn

from levelhead.preflight_checks.calls import seen_calls
from levelhead.preflight_checks.flight import Flight
from levelhead.preflight_checks.zeros import write
from levelhead.runs.record import Facts, Record, Run

_SAME = 5e-3  # own: relative; scales that differ by less are the same


def corrected(flight: Flight, run: Run) -> Run:
    """The run without learned scales that are none."""
    unmoved = _unmoved(flight, run)

    def mended(record: Record) -> Record:
        return replace(record, facts=replace(record.facts, learned_scale="")) if record.module in unmoved else record

    return replace(run, snapshots=tuple(replace(s, records=tuple(map(mended, s.records))) for s in run.snapshots))


def _unmoved(flight: Flight, run: Run) -> set[str]:
    """Modules whose scale stays as it is when the parameter changes that it is said to be: a gate of zeros is no
    temperature, although e^0 is the scale."""
    said = {r.module: r.facts for r in run.latest if r.facts.learned_scale and r.facts.effective_scale is not None}
    if not said:
        return set()
    with _changed([x for module, facts in said.items() for x in _parameters(flight.model, module, facts)]):
        after = {r.module: r.facts.effective_scale for r in seen_calls(flight.batch)[0].latest}
    return {
        module
        for module, facts in said.items()
        if (now := after.get(module)) is not None and abs(now / (facts.effective_scale or 1.0) - 1) < _SAME
    }


def _parameters(model: nn.Module, module: str, facts: Facts) -> Iterator[Tensor]:
    """Of this name in the module, or directly in one around it."""
    name, modules = facts.learned_scale, dict(model.named_modules())
    inside = modules.get(module)
    if inside is not None:
        yield from (x for path, x in inside.named_parameters() if path == name)
    while module:
        module = module.rpartition(".")[0]
        outer = modules[module]
        own = outer.named_parameters(recurse=False)
        yield from (x for path, x in own if f"{type(outer).__name__}.{path}" == name)


@contextmanager
def _changed(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Other numbers in these parameters meanwhile."""
    kept = [(x, x.detach().clone()) for x in {id(x): x for x in parameters}.values()]
    try:
        for x, old in kept:
            write(x, old * 1.5 + 0.25)
        yield
    finally:
        for x, old in kept:
            write(x, old)
