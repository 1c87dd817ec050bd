"""Parameters of zeros: nothing moves through an output projection or a gate that starts at zero.

Passes that look for what moves run with ordinary random numbers in such parameters, which are put back afterwards.
Where tokens do not depend on each other even so, what stood still says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch
from torch import Tensor, nn

from levelhead.errors import LevelheadError
from levelhead.preflight_checks.flight import Flight
from levelhead.preflight_checks.passes import moved, taped

_NONE = 2e-3  # own: the largest number of a parameter that lets nothing through; LayerScale starts at 1e-4 … 1e-6
_MOVING = (
    "batch independence",
    "causality",
    "padding independence",
    "order of rows",
)  # each passes if something stands still


@contextmanager
def filled(flight: Flight) -> Iterator[Flight]:
    """The same flight with random numbers in parameters of zeros; its checks say so."""
    zeros = _zeros(flight.model)
    before = len(flight.checks)
    kept = [(x, x.detach().clone()) for x in zeros.values()]
    try:
        here = _with_numbers(flight, zeros) if zeros else None
        if here is None:
            for x, old in kept:
                write(x, old)
        yield here or flight
        with suppress(LevelheadError):
            _check_dependence(here or flight, before)
    finally:
        for x, old in kept:
            write(x, old)
    if here is not None:
        first = next(iter(zeros))
        said = f"with random numbers in {len(zeros)} parameters of zeros (first: {first})"
        flight.checks[before:] = [replace(c, changed=f"{c.changed}, {said}") for c in flight.checks[before:]]


def _zeros(model: nn.Module) -> dict[str, Tensor]:
    """Weights and gates, by name; a bias of zeros stops nothing."""
    every = dict(model.named_parameters())
    learned = {name: x for name, x in every.items() if x.requires_grad} or every
    return {
        name: x
        for name, x in learned.items()
        if x.is_floating_point() and x.element_size() > 1 and x.layout is torch.strided and x.numel()
        if not (name.endswith("bias") and x.dim() < 2) and float(x.detach().abs().max()) <= _NONE
    }


def _with_numbers(flight: Flight, zeros: dict[str, Tensor]) -> Flight | None:
    """None: the model does not run so."""
    generator = torch.Generator().manual_seed(7)
    for x in zeros.values():
        sizes = [n for n in x.shape if n > 1]
        if len(sizes) < 2:  # a gate, or the gains of a norm
            write(x, torch.rand(x.shape, generator=generator) / 2 + 0.5)
        else:
            write(x, torch.randn(x.shape, generator=generator) * x.shape[-1] ** -0.5)
    try:
        tape = taped(flight.batch)
    except LevelheadError:
        return None
    broken = any(x.isnan().any() for x in tape.outputs) and not any(x.isnan().any() for x in flight.tape.outputs)
    return None if broken else Flight(flight.batch, tape, flight.checks, flight.findings)


def write(x: Tensor, numbers: Tensor) -> None:
    """Into a parameter; a backward that is still to come does not notice."""
    with torch.inference_mode(x.is_inference()):
        x.data.copy_(numbers)


def _check_dependence(flight: Flight, begin: int) -> None:
    """Where no token moves another, checks that passed because nothing moved are not judged."""
    passed = [n for n, c in enumerate(flight.checks) if n >= begin and c.verdict == "passed" and c.name in _MOVING]
    if not passed or _depend(flight):
        return
    why = "the outputs do not depend on other tokens (a projection or gate of zeros, or tokens that never meet)"
    for n in passed:
        flight.checks[n] = replace(flight.checks[n], verdict="not judged", moved=why)


def _depend(flight: Flight) -> bool:
    """Whether a changed token moves the output of another one; True, too, where that cannot be read."""
    stream = flight.batch.stream()
    if stream is None or not flight.grid(stream).clear or flight.grid(stream).tokens < 3:
        return True
    grid = flight.grid(stream)
    for t in (1, grid.tokens // 2, 0):
        after = taped(flight.batch.changed(stream, grid.token(t)))
        here = moved(flight.tape, after, grid.at(~grid.token(t)))
        if here.size or not here.compared:
            return True
    return False
