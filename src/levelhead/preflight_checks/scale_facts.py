"""Corrections of what a watch reads of scales: a parameter that is the scale only by chance, and a `score_mod` of
flex_attention that scales the logits once more."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from levelhead.preflight_checks.calls import SeenCall, seen_calls
from levelhead.preflight_checks.flight import Flight
from levelhead.preflight_checks.zeros import write
from levelhead.runs.record import Facts, Run
from levelhead.watching.mask_functions import scored

_SAME = 5e-3  # own: relative; slopes and scales that differ by less are the same
_SCORE = 0.25  # own: a small score, where a soft cap is still a line


def corrected(flight: Flight, run: Run, calls: Sequence[SeenCall]) -> Run:
    """The run with these facts mended."""
    unmoved = _unmoved(flight, run)
    slopes = {call.module: _slope(call) for call in calls if call.call.score_mod is not None}

    def mended(module: str, facts: Facts) -> Facts:
        if module in unmoved:
            facts = replace(facts, learned_scale="")
        if facts.effective_scale is None or abs(slopes.get(module, 1.0) - 1) < _SAME:
            return facts
        slope = slopes[module]
        if math.isnan(slope):  # another one at every place
            return replace(facts, effective_scale=None, effective_scales=(), scale_reading="a score_mod changes it")
        each = tuple(scale * slope for scale in facts.effective_scales)
        return replace(facts, effective_scale=facts.effective_scale * slope, effective_scales=each)

    snapshots = [
        replace(s, records=tuple(replace(r, facts=mended(r.module, r.facts)) for r in s.records)) for s in run.snapshots
    ]
    return replace(run, snapshots=tuple(snapshots))


def _slope(call: SeenCall) -> float:
    """How much of a small change of a score a `score_mod` passes on, if that is the same at all places; else NaN."""
    hidden = call.hidden()
    if hidden is None or call.call.score_mod is None:
        return math.nan
    i, j = (torch.arange(n, device=hidden.device) for n in hidden.shape[2:])
    scores = (torch.full(hidden.shape, x, device=hidden.device) for x in (-_SCORE, _SCORE))
    low, high = (scored(call.call.score_mod, x, i, j) for x in scores)
    slopes = ((high - low) / (2 * _SCORE))[~hidden]
    if not slopes.numel() or float(slopes.max() - slopes.min()) > _SAME * float(slopes.abs().max()):
        return math.nan
    return float(slopes.mean())


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
