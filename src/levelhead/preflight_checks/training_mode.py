"""Causality in training mode, without dropout: a mask that only the path of evaluation applies is missing where it
counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from levelhead.errors import LevelheadError
from levelhead.preflight_checks.flight import Flight
from levelhead.preflight_checks.inputs import Key
from levelhead.preflight_checks.operators import train
from levelhead.preflight_checks.passes import Moved, Tape, moved, same, taped


def later_tokens(flight: Flight, stream: Key, tokens: Sequence[int], unpadded: Tensor) -> Moved | str:
    """What a change of these tokens moves at earlier ones; or why it is not known."""
    grid = flight.grid(stream)
    with _training(flight.model):
        try:
            before, again = (taped(flight.batch, seed=seed) for seed in (0, 1))
            if not _alike(before, again) or not all(map(same, before.outputs, again.outputs)):
                return "its results are random, or have another form than in evaluation"
            if not _alike(before, flight.tape):
                return "its results have another form than in evaluation"
            for t in tokens:
                after = taped(flight.batch.changed(stream, grid.token(t)))
                here = moved(before, after, grid.at(grid.before(t) & unpadded))
                if here.size:
                    return here
        except LevelheadError:
            return "it does not run in training mode"
    return Moved(0.0, None, 1)


def _alike(a: Tape, b: Tape) -> bool:
    return [x.shape for x in a.outputs] == [x.shape for x in b.outputs]


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Training mode with every rate of dropout at 0; norms over the batch stay as they are."""
    modules = list(model.modules())
    modes = [(module, module.training) for module in modules]
    rates = [
        (module, name, rate)
        for module in modules
        for name, rate in vars(module).items()
        if isinstance(rate, float) and ("drop" in name or (name == "p" and "Drop" in type(module).__name__))
    ]
    try:
        for module, name, _ in rates:
            setattr(module, name, 0.0)
        for module in modules:
            train(module)
        yield
    finally:
        for module, name, rate in rates:
            setattr(module, name, rate)
        for module, mode in modes:
            module.training = mode
