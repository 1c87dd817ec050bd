"""A claim of the lab: a sentence, a derivation, an experiment, a criterion for the verdict, and plots of the result.

A claim's file defines `CLAIM`. It measures on the real core; caching and processes are the runner's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Verdict: TypeAlias = Literal["confirmed", "caveat", "refuted", "undecided"]
VERDICTS: tuple[Verdict, ...] = ("confirmed", "caveat", "refuted", "undecided")

Params: TypeAlias = Mapping[str, Any]  # what `--set` can change; JSON values
Path: TypeAlias = tuple[str, ...]
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
class Plot:
    """One chart of a claim's result: where in the result its lines are.

    A path begins with a field of the result: ("measured", "entropy"). It ends at a list, at a curve (`Curve.json()`)
    or at a mapping of those, which is a line for each name. A line in `measured` has its band from `stderr` and its
    theory from `theory`, at the same path. What a result does not have is left out.
    """

    title: str
    x: str  # titles of the axes
    y: str
    lines: Mapping[str, Path]  # by name; "": the last word of the path
    along: Path = ()  # of the x values; (): those of a curve, else 0, 1, 2, …
    theory: Mapping[str, Path] = field(default_factory=dict)
    log: str = ""  # "x", "y" or "xy"
    heat: bool = False  # rows by columns


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
    plots: Sequence[Plot] = ()


@dataclass(frozen=True)
class Task:
    """One measurement of a claim."""

    claim: Claim
    params: Params
    seed: int
