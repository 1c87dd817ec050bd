"""The problem of a case, by its kind of work."""

from __future__ import annotations

from collections.abc import Callable

from levelhead.bench import additive, inputs, models
from levelhead.bench.calls import Question
from levelhead.bench.cases import Case, Work

_MAKERS: dict[Work, Callable[[Case, int], Question]] = {
    "attention": inputs.make,
    "training": inputs.make,
    "additive": additive.make,
    "model": models.make,
}


def make(case: Case, seed: int = 0) -> Question:
    """The case with numbers in it; `Refused` where what it is about is not installed."""
    return _MAKERS[case.work](case, seed)
