"""A figure as data: numbers, their sources, and the code that made them.

It has no colours and needs no plotting library. `json()` is what the page draws. Every number has a source: live
(computed now), recorded (from a committed run) or theory (a formula).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from numpy.typing import ArrayLike

from levelhead import stats
from levelhead.json_numbers import json_value

Source: TypeAlias = Literal["live", "recorded", "theory"]
Shape: TypeAlias = Literal["line", "points", "bars", "heat"]


@dataclass(frozen=True)
class Axis:
    title: str
    log: bool = False
    range: tuple[float, float] | None = None  # in the axis' own units, also where it is logarithmic


@dataclass(frozen=True)
class Series:
    """Numbers of one kind. A heat map has `z`, rows by columns; a line may have a band, points may have error bars."""

    name: str
    source: Source
    shape: Shape
    x: ArrayLike | Sequence[str]
    y: ArrayLike | Sequence[str]
    z: ArrayLike | None = None
    low: ArrayLike | None = None  # of a band or a bar around y
    high: ArrayLike | None = None
    shades: tuple[float, float] | None = None  # of a heat map: the values of its palest and its fullest colour
    quiet: bool = False  # one of many that make a picture together: thin, without a legend


@dataclass(frozen=True)
class Chart:
    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    about: str = ""  # the text alternative
    outside: Mapping[str, float] = field(default_factory=dict)  # left, right: share of the data beyond the frame;
    # above: the largest y, where that is


@dataclass(frozen=True)
class Fact:
    """One number in words: "σ measured", 0.998 ± 0.004, live."""

    label: str
    value: float | str
    source: Source
    stderr: float | None = None
    formula: str = ""  # for theory: how it comes about

    def text(self) -> str:
        """The value, with its standard error if it has one."""
        value = self.value if isinstance(self.value, str) else f"{self.value:.6g}"
        return value if self.stderr is None else f"{value} ± {self.stderr:.2g}"


@dataclass(frozen=True)
class Gauge:
    """A spirit level. `bubble` is 0 (flat) to 1 (saturated), 0.5 the middle."""

    label: str
    level: stats.Level
    bubble: float | None  # None: nothing seen
    normalised_entropy: float
    source: Source

    def text(self) -> str:
        """The spirit level in text."""
        tube = stats.gauge(self.normalised_entropy, self.level)
        return f"{tube} {self.level}, H/ln n {self.normalised_entropy:.3f}"


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
    claims: Sequence[Mapping[str, str]] = ()  # that it shows: id and verdict of each
    extra: Mapping[str, Any] = field(default_factory=dict)  # for panels that draw something of their own

    def json(self) -> dict[str, Any]:
        """Plain lists and numbers; six digits; what is not finite is None."""
        converted: dict[str, Any] = json_value(self, digits=6)
        return converted

    def __str__(self) -> str:
        """The facts and gauges in aligned columns; the charts' numbers are in `json()`."""
        rows = [(x.label, x.text(), f"{x.source}: {x.formula}" if x.formula else x.source) for x in self.facts]
        rows += [(x.label, x.text(), x.source) for x in self.gauges]
        width = max((len(label) for label, _, _ in rows), default=0)
        lines = [self.title, *(f"  {label:<{width}}  {text}  ({source})" for label, text, source in rows)]
        shown = ", ".join(f"{claim['id']} {claim['verdict']}" for claim in self.claims)
        claims = f"Claims: {shown}" if shown else ""
        return "\n".join([*lines, *(words for words in (self.note, self.recorded, claims) if words)])

    def _repr_html_(self) -> str:
        """The same with pictures, for notebooks."""
        from levelhead.lab import figure_html

        return figure_html.figure(self)


def snippet(id: str, **arguments: Any) -> str:
    """The Python that makes a figure with these arguments and prints it."""
    words = ", ".join([f'"{id}"', *(f"{name}={_literal(value)}" for name, value in arguments.items())])
    return f"import levelhead as lh\n\nprint(lh.lab.figure({words}))\n"


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) and '"' not in value else repr(value)
