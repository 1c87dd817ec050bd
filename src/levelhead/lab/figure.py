"""What a figure holds, whoever draws it: numbers, their sources, and the code that made them.

A figure knows no colours and no plotting library. `json()` is what the page draws; every number in
it says whether it is live (computed now), recorded (from a committed run) or theory (a formula).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["Axis", "Chart", "Fact", "Figure", "Gauge", "Series", "Source"]

Source: TypeAlias = Literal["live", "recorded", "theory"]
Shape: TypeAlias = Literal["line", "points", "bars", "heat"]


@dataclass(frozen=True)
class Axis:
    title: str
    log: bool = False
    range: tuple[float, float] | None = None  # in the axis' own units, also where it is logarithmic


@dataclass(frozen=True)
class Series:
    """Numbers of one kind. A heat map has `z`, rows by columns; a line may have a band."""

    name: str
    source: Source
    shape: Shape
    x: ArrayLike | Sequence[str]
    y: ArrayLike | Sequence[str]
    z: ArrayLike | None = None
    low: ArrayLike | None = None  # of a band around y
    high: ArrayLike | None = None
    quiet: bool = False  # one of many that make a picture together: thin, without a legend


@dataclass(frozen=True)
class Chart:
    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    about: str = ""  # what a person who cannot see it is told


@dataclass(frozen=True)
class Fact:
    """One number in words: "σ measured", 0.998 ± 0.004, live."""

    label: str
    value: float | str
    source: Source
    stderr: float | None = None
    formula: str = ""  # for theory: how it comes about


@dataclass(frozen=True)
class Gauge:
    """A spirit level. `bubble` is 0 (flat) to 1 (saturated), 0.5 the middle."""

    label: str
    level: str  # flat, level, sharp, saturated
    bubble: float
    normalised_entropy: float
    source: Source


@dataclass(frozen=True)
class Figure:
    id: str
    title: str
    charts: Sequence[Chart]
    python: str  # prints the same numbers when run
    facts: Sequence[Fact] = ()
    gauges: Sequence[Gauge] = ()
    note: str = ""  # a sentence: what to see
    recorded: str = ""  # where recorded numbers come from: machine, date, command
    extra: Mapping[str, Any] = field(
        default_factory=dict
    )  # for panels that draw something of their own

    def json(self) -> dict[str, Any]:
        """Plain lists and numbers; six digits; what is not finite is None."""
        found: dict[str, Any] = _plain(self)
        return found


def _plain(value: Any) -> Any:
    if isinstance(value, float | np.floating):
        return float(f"{value:.6g}") if np.isfinite(value) else None
    if isinstance(value, np.integer | np.bool_):
        return value.item()
    if isinstance(value, np.ndarray):
        return [_plain(x) for x in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return value
