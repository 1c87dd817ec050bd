"""Bars of every ratio in a result, as two hand-written SVG files: for light and for dark pages.

One line per cell, grouped by family: a bar from 1× (the fastest peer) to our ratio on a logarithmic axis, a tick where
the bar of the cell lies. Cells that were lost point the other way, in red.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

WIDTH, LEFT, RIGHT, TOP = 880, 200, 160, 80
LINE, GAP = 17, 26  # of a cell; of a family's title
FONT = "font-family='system-ui, sans-serif'"


@dataclass(frozen=True, slots=True)
class Theme:
    name: str
    paper: str
    ink: str
    faint: str
    ahead: str
    below: str
    lost: str


LIGHT = Theme("light", "#ffffff", "#1f2328", "#d0d7de", "#2f6fb7", "#c58a1b", "#c0392b")
DARK = Theme("dark", "#0d1117", "#e6edf3", "#30363d", "#5aa2f0", "#d9a441", "#f0705f")


def plot(result: dict[str, Any], folder: Path, name: str = "bench") -> list[Path]:
    """Writes NAME-light.svg and NAME-dark.svg and returns their paths."""
    return write(folder, name, partial(_svg, result))


def write(folder: Path, name: str, draw: Callable[[Theme], Iterable[str]]) -> list[Path]:
    """Writes a drawing as NAME-light.svg and NAME-dark.svg and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}-{theme.name}.svg" for theme in (LIGHT, DARK)]
    for path, theme in zip(paths, (LIGHT, DARK), strict=True):
        path.write_text("\n".join(draw(theme)) + "\n", encoding="utf-8")
    return paths


def _svg(result: dict[str, Any], theme: Theme) -> Iterator[str]:
    cells = [c for c in result["cells"] if "ratio_by_best" in c["verdict"] and not c["observed"]]
    families = list(dict.fromkeys(cell["family"] for cell in cells))
    axis = _Axis(cells)
    height = TOP + LINE * len(cells) + GAP * len(families) + 30
    size = f"width='{WIDTH}' height='{height}' viewBox='0 0 {WIDTH} {height}'"
    title = "levelhead: times faster than the fastest peer of each cell"
    yield f"<svg xmlns='http://www.w3.org/2000/svg' {size} {FONT} font-size='11' role='img'>"
    yield f"<title>{title}</title>"
    yield f"<rect width='100%' height='100%' fill='{theme.paper}'/>"
    yield text(16, 24, title, theme.ink, size=15, weight=600)
    yield text(16, 42, _subtitle(result), theme.ink)
    yield from _legend(theme)
    for value in axis.ticks():
        x = axis.x(value)
        colour = theme.ink if value == 1 else theme.faint
        yield line(x, TOP - 6, x, height - 24, colour)
        yield text(x, height - 10, f"{value:g}×", theme.ink, anchor="middle")
    y = TOP
    for family in families:
        y += GAP
        yield text(16, y - 8, family, theme.ink, size=12, weight=600)
        for cell in (cell for cell in cells if cell["family"] == family):
            yield from _bar(cell, axis, y, theme)
            y += LINE
    yield "</svg>"


def _subtitle(result: dict[str, Any]) -> str:
    machine, mean = result["machine"], result["summary"]["geometric_mean"]["best"]
    words = f"{machine['cpu']}, {result['threads']} threads, {machine['isa']}, {result['date'][:10]}"
    return words if mean is None else f"{words}; geometric mean {mean:.2f}×"


def _legend(theme: Theme) -> Iterator[str]:
    x = 16.0
    for colour, words in (
        (theme.ahead, "bar met (the tick; a share of the CPU's peak may stand in for it)"),
        (theme.below, "ahead, below the bar"),
        (theme.lost, "lost"),
    ):
        yield f"<rect x='{x:.1f}' y='52' width='9' height='9' rx='2' fill='{colour}'/>"
        yield text(x + 14, 60, words, theme.ink)
        x += 34 + 6 * len(words)


def _bar(cell: dict[str, Any], axis: _Axis, y: float, theme: Theme) -> Iterator[str]:
    verdict = cell["verdict"]
    ratio = verdict["ratio_by_best"]
    colour = {"met": theme.ahead, "lost": theme.lost}.get(verdict["word"], theme.below)
    begin, end = sorted((axis.x(1), axis.x(ratio)))
    middle = y + LINE / 2 + 4
    yield text(LEFT - 8, middle, cell["name"], theme.ink, anchor="end")
    yield (
        f"<rect x='{begin:.1f}' y='{y + 3}' width='{max(end - begin, 1):.1f}' "
        f"height='{LINE - 6}' rx='2' fill='{colour}'/>"
    )
    at = axis.x(cell["bar"]["ratio"])
    yield line(at, y + 1, at, y + LINE - 1, theme.ink, width=1.5)
    words = f"{ratio:.2f}× {verdict['fastest_by_best']}"
    yield text(max(end, at) + 6, middle, words, theme.ink)


class _Axis:
    """Ratios to pixels, logarithmic, with room for the smallest and the largest."""

    def __init__(self, cells: list[dict[str, Any]]) -> None:
        ratios = [cell["verdict"]["ratio_by_best"] for cell in cells]
        bars = [cell["bar"]["ratio"] for cell in cells]
        self._low = math.log2(min([0.5, *ratios]))
        self._high = math.log2(max([4.0, *ratios, *bars]))

    def x(self, ratio: float) -> float:
        share = (math.log2(ratio) - self._low) / (self._high - self._low)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def ticks(self) -> list[float]:
        return [2.0**n for n in range(math.ceil(self._low), math.floor(self._high) + 1)]


def text(
    x: float, y: float, words: str, colour: str, *, size: int = 11, weight: int = 400, anchor: str = "start"
) -> str:
    """An SVG element of words."""
    style = f"font-size='{size}' font-weight='{weight}' text-anchor='{anchor}' fill='{colour}'"
    return f"<text x='{x:.1f}' y='{y:.1f}' {style}>{escape(words)}</text>"


def line(x1: float, y1: float, x2: float, y2: float, colour: str, *, width: float = 1) -> str:
    """An SVG element of a straight line."""
    ends = f"x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}'"
    return f"<line {ends} stroke='{colour}' stroke-width='{width}'/>"
