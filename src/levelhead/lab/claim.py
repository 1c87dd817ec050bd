"""What a claim is in the lab: a sentence, a derivation, an experiment, a criterion for the verdict.

A claim's file defines `CLAIM`. It measures on the real core; the lab's runner times, caches and
compares, and a claim knows nothing about that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

__all__ = ["VERDICTS", "Claim", "Outcome", "Params", "Tell", "UndecidedError", "Verdict"]

Verdict: TypeAlias = Literal["confirmed", "caveat", "refuted", "undecided"]
VERDICTS: tuple[Verdict, ...] = ("confirmed", "caveat", "refuted", "undecided")

Params: TypeAlias = Mapping[str, Any]  # what `--set` can change; JSON values
Tell: TypeAlias = Callable[[float, str], None]  # share done, what is being done


class UndecidedError(Exception):
    """An experiment cannot decide here: a model is missing, the measurement is too noisy."""


@dataclass(frozen=True)
class Outcome:
    """What an experiment found. Everything is JSON: numbers, strings, lists, dicts."""

    theory: Any
    measured: Any
    stderr: Any  # of what was measured, in the same shape; None where nothing is random
    verdict: Verdict
    details: Mapping[str, Any] = field(default_factory=dict)  # series for figures; not printed


@dataclass(frozen=True)
class Claim:
    id: str
    claim: str  # one sentence
    derivation: str  # a few lines of plain text
    criterion: str  # when the verdict is what, in words
    expected: Verdict
    quick: Params
    full: Params  # only what differs from quick
    experiment: Callable[[Params, int, Tell], Outcome]  # parameters, seed, progress
    alone: bool = False  # measures time: runs last, with nothing beside it
    forget: Callable[[], None] | None = None  # drops what the experiment keeps between runs
