"""The effective scale where watching does not find the origin of q and k: what noise behind their projections does.

Noise in the output of a projection arrives in q multiplied by a factor, whatever else is added there (LoRA, positions);
rotations keep its length. The factors of q and k times the scale of the product are the effective scale. It is taken
only if it is a number that code contains: none, 1/√d_k, that twice or by half. A mean of two projections is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.preflight_checks.calls import SeenCall, seen_calls
from levelhead.preflight_checks.flight import Flight
from levelhead.preflight_checks.projections import compared, home
from levelhead.runs.record import Record, Run
from levelhead.watching import effective_scale, scale_sides

_NEAR = 5e-3


def read(flight: Flight, run: Run, calls: Sequence[SeenCall]) -> Run:
    """The run, with effective scales where they were not known and noise shows them."""
    unknown = {r.module: r for r in run.latest if r.facts.effective_scale is None and r.facts.product_scale is not None}
    unknown = {m: r for m, r in unknown.items() if r.facts.scale_reading != scale_sides.NORMALISED}
    seen = [call.module for call in calls]
    chosen = [call for call in calls if call.module in unknown and seen.count(call.module) == 1 and call.whole]
    paths = {call.module: found for call in chosen if (found := _projections(flight, call)) is not None}
    chosen = [call for call in chosen if call.module in paths]
    if not chosen:
        return run
    of_q, of_k = (_factors(flight, chosen, {m: pair[n] for m, pair in paths.items()}, n) for n in (0, 1))
    known = {}
    for module in of_q.keys() & of_k.keys():
        scale = (unknown[module].facts.product_scale or 0.0) * of_q[module] * of_k[module]
        if _written(scale, unknown[module].facts.d_k):
            known[module] = scale
    snapshots = [replace(s, records=tuple(_with(r, known) for r in s.records)) for s in run.snapshots]
    return replace(run, snapshots=tuple(snapshots))


def _with(record: Record, known: dict[str, float]) -> Record:
    if record.module not in known:
        return record
    reading = scale_sides.FROM_PROJECTIONS
    return replace(record, facts=replace(record.facts, effective_scale=known[record.module], scale_reading=reading))


def _written(scale: float, d_k: int) -> bool:
    usual = (d_k**power for power in (0.0, -0.25, -0.5, -1.0))
    return d_k > 1 and scale > 0 and any(abs(math.log(scale / x)) < 2 * _NEAR for x in usual)


def _projections(flight: Flight, call: SeenCall) -> tuple[str, str] | None:
    """Those of q and k, each run once, with columns for the heads of the call."""
    modules = dict(flight.model.named_modules())
    here = home(call.module, modules) if call.module in modules else ""
    found: dict[str, str] = {}
    for child, _ in modules[here].named_children():
        role, path = effective_scale.role(child), f"{here}.{child}" if here else child
        made = flight.tape.entries.get((path, 0))
        if role in ("q", "k") and made is not None and made.outputs and (path, 1) not in flight.tape.entries:
            found[role] = path
    B, H, T, D = call.q.shape
    sizes = {role: flight.tape.entries[path, 0].outputs[0].shape for role, path in found.items()}
    if sizes.keys() != {"q", "k"} or sizes["q"] != (B, T, H * D) or sizes["k"][:2] != (B, call.keys):
        return None
    return (found["q"], found["k"]) if call.k.shape[1] * D in (sizes["k"][2], H * D) else None


def _factors(flight: Flight, calls: Sequence[SeenCall], paths: dict[str, str], which: int) -> dict[str, float]:
    """By module: how much of the noise behind a projection arrives at the product, if it is the same everywhere."""
    modules = dict(flight.model.named_modules())
    noises = {module: _noise(flight.tape.entries[path, 0].outputs[0]) for module, path in paths.items()}

    def around() -> list[Any]:
        handles = [modules[path].register_forward_hook(_adds(noises[module])) for module, path in paths.items()]
        for module in paths:  # later layers read what they read without noise
            here = home(module, modules)
            kept = flight.tape.entries[here, 0].outputs[0]
            handles.append(modules[here].register_forward_hook(compared(here, kept, {})))
        return handles

    after = {call.module: call for call in seen_calls(flight.batch, around)[1]}
    return dict(_arrived(calls, after, noises, which))


def _arrived(
    calls: Sequence[SeenCall], after: dict[str, SeenCall], noises: dict[str, Tensor], which: int
) -> Iterator[tuple[str, float]]:
    for call in calls:
        if call.module not in after:
            continue
        old, new = ((each.q, each.k)[which].double() for each in (call, after[call.module]))
        noise = noises[call.module].double()
        noise = noise.reshape(*noise.shape[:2], -1, old.shape[3]).transpose(1, 2)
        noise = noise.repeat_interleave(old.shape[1] // noise.shape[1], 1)
        ratio = (new - old).norm(dim=-1) / noise.norm(dim=-1)
        if float(ratio.std()) < _NEAR * float(ratio.mean()):
            yield call.module, float(ratio.mean())


def _noise(output: Tensor) -> Tensor:
    noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(11)).to(output)
    return noise * output.float().std().clamp(min=1e-2).to(output)


def _adds(noise: Tensor) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return output + noise if isinstance(output, Tensor) and output.shape == noise.shape else None

    return hook
