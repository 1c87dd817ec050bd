"""A chart as a small SVG, for notebooks: enough to see its shape, no more.

It takes a chart as `Figure.json()` has it. The page draws with more care; here there are a few labels per axis and a
legend. Theory is dashed, and nothing is referred to by address. Colours keep apart on white and on black.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from itertools import accumulate, compress, groupby
from typing import Any

WIDTH, HEIGHT = 420, 230
LEFT, RIGHT, TOP, BOTTOM = 46, 20, 24, 34
COLOURS = ("#2f86c9", "#d8761f", "#4a9d4a", "#a56bc4", "#8a8a8a")

Place = Callable[[float], float]
Part = Mapping[str, Any]


def svg(chart: Part) -> str:
    """The chart, as tall as its legend needs."""
    series: list[Part] = chart["series"]
    named = [one for one in series if not one["quiet"] and one["shape"] != "heat"]
    height = HEIGHT + 14 * math.ceil(len(named) / _beside(named))
    heat = next((one for one in series if one["shape"] == "heat"), None)
    drawn = list(_heat(heat)) if heat else list(_lines(chart, series))
    inside = "".join([*drawn, *_words(chart), *_legend(named, series)])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="sans-serif" font-size="10" fill="currentColor" role="img">'
        f"<title>{escape(chart['title'])}</title><desc>{escape(chart['about'])}</desc>{inside}</svg>"
    )


def _lines(chart: Part, series: Sequence[Part]) -> Iterator[str]:
    bars = any(one["shape"] == "bars" for one in series)
    left, right = _range(chart["x"], [_numbers(one, "x") for one in series])
    low, high = _range(chart["y"], [_numbers(one, "y") for one in series], bars)
    x = _placed(left, right, LEFT, WIDTH - RIGHT, chart["x"]["log"])
    y = _placed(low, high, HEIGHT - BOTTOM, TOP, chart["y"]["log"])
    for at, words in _names(series) or _ticks(left, right, chart["x"]["log"]):
        yield _label(round(x(at), 1), HEIGHT - BOTTOM + 12, "middle", escape(words))
    for at, words in _ticks(low, high, chart["y"]["log"]):
        yield f'<path d="M{LEFT} {y(at):.1f}H{WIDTH - RIGHT}" stroke="currentColor" opacity="0.12"/>'
        yield _label(LEFT - 4, round(y(at) + 3, 1), "end", words)
    for one, colour in zip(series, _colours(series), strict=True):
        yield from _series(_within(one, left, right), colour, x, y)


def _names(series: Sequence[Part]) -> list[tuple[float, str]]:
    """The words along an axis of words, some of them where there are many; none along an axis of numbers."""
    words: Sequence[str] = next((one["x"] for one in series if any(isinstance(x, str) for x in one["x"])), [])
    every = math.ceil(sum(len(word) + 2 for word in words) / 60) if words else 1
    return [(float(i), word) for i, word in enumerate(words)][::every]


def _ticks(low: float, high: float, log: bool) -> list[tuple[float, str]]:
    """Round numbers within an axis, about five; the ends of one that has no two of them."""
    if log:
        decades = [10.0**n for n in range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)]
        found = decades[:: math.ceil(len(decades) / 5) or 1]
    else:
        rough = (high - low) / 4
        unit = 10.0 ** math.floor(math.log10(rough))
        step = unit * next(n for n in (1, 2, 2.5, 5, 10) if n * unit >= rough)
        found = [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    ends = [(x, f"{x:.{4 if abs(x) >= 1 else 2}g}") for x in (low, high)]
    return [(x, f"{x:.4g}") for x in found] if len(found) > 1 else ends


def _colours(series: Sequence[Part]) -> list[str]:
    """Theory has the colour of what it is the theory of: the one before."""
    measured = accumulate(int(one["source"] != "theory") for one in series)
    return [COLOURS[max(i - 1, 0) % len(COLOURS)] for i in measured]


def _within(one: Part, low: float, high: float) -> Part:
    """The series without what lies beyond the x axis."""
    kept = [low <= x <= high for x in _numbers(one, "x")]
    columns = {name: one[name] for name in ("x", "y", "low", "high") if one[name]}
    return {**one, **{name: list(compress(values, kept)) for name, values in columns.items()}}


def _numbers(one: Part, name: str) -> list[float]:
    """Numbers of an axis; words are counted. A band belongs to y."""
    if any(isinstance(x, str) for x in one[name]):
        return [float(i) for i in range(len(one[name]))]
    more = [*(one["low"] or ()), *(one["high"] or ())] if name == "y" else []
    return [x for x in (*one[name], *more) if x is not None]


def _range(axis: Part, series: Sequence[Sequence[float]], bars: bool = False) -> tuple[float, float]:
    if axis["range"]:
        return axis["range"][0], axis["range"][1]
    values = [x for some in series for x in some if x > 0 or not axis["log"]] or [1.0]
    low, high = min(values), max(values)
    if bars and not axis["log"]:
        low = min(low, 0.0)
    return (low, high) if high > low else (low / 2 if axis["log"] else low - 1, high + 1)


def _placed(low: float, high: float, start: float, end: float, log: bool) -> Place:
    def place(x: float) -> float:
        share = math.log(max(x, low) / low) / math.log(high / low) if log else (x - low) / (high - low)
        return start + min(max(share, 0.0), 1.0) * (end - start)

    return place


def _series(one: Part, colour: str, x: Place, y: Place) -> Iterator[str]:
    across = _numbers(one, "x")
    pairs = list(zip(across, one["y"], strict=True))
    points = [(x(a), y(b)) for a, b in pairs if b is not None]
    if one["shape"] == "bars":
        yield from _bars(points, colour)
    elif one["shape"] == "points":
        yield from (f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" fill="{colour}"/>' for a, b in points)
        if one["low"] and None not in (*one["low"], *one["high"]):
            bars = zip(across, one["low"], one["high"], strict=True)
            yield from (f'<path d="M{x(a):.1f} {y(b):.1f}V{y(c):.1f}" stroke="{colour}"/>' for a, b, c in bars)
    else:
        if one["low"] and None not in (*one["low"], *one["high"]):
            there = zip(across, one["high"], strict=True)
            back = zip(across[::-1], one["low"][::-1], strict=True)
            edge = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in (*there, *back))
            yield f'<polygon points="{edge}" fill="{colour}" opacity="0.15"/>'
        dash = ' stroke-dasharray="4 3"' if one["source"] == "theory" else ""
        look = f'stroke="{colour}" stroke-width="{0.5 if one["quiet"] else 1.5}"{dash}'
        for known, run in groupby(pairs, key=lambda pair: pair[1] is not None):
            if known:  # a line is interrupted where there is no number
                path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in run)
                yield f'<polyline points="{path}" fill="none" {look}/>'


def _bars(points: Sequence[tuple[float, float]], colour: str) -> Iterator[str]:
    pitch = points[1][0] - points[0][0] if len(points) > 1 else float(WIDTH)
    wide, ground = max(0.8 * pitch, 1.0), HEIGHT - BOTTOM
    for a, b in points:
        box = f'x="{a - wide / 2:.1f}" y="{b:.1f}" width="{wide:.1f}" height="{ground - b:.1f}"'
        yield f'<rect {box} fill="{colour}" opacity="0.6"/>'


def _heat(one: Part) -> Iterator[str]:
    """Cells, the fuller the larger; negative ones in the second colour."""
    rows, columns = len(one["z"]), len(one["x"])
    wide, high = (WIDTH - LEFT - RIGHT) / columns, (HEIGHT - TOP - BOTTOM) / rows
    most = max((abs(z) for line in one["z"] for z in line if z is not None), default=0.0) or 1.0
    for i, line in enumerate(one["z"]):
        for j, z in enumerate(line):
            if z is not None:
                yield (
                    f'<rect x="{LEFT + j * wide:.1f}" y="{TOP + i * high:.1f}" width="{wide:.1f}" '
                    f'height="{high:.1f}" fill="{COLOURS[z < 0]}" opacity="{abs(z) / most:.2f}"/>'
                )


def _label(x: float, y: float, anchor: str, words: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{words}</text>'


def _words(chart: Part) -> Iterator[str]:
    yield f'<text x="{LEFT}" y="14" font-weight="600">{escape(chart["title"])}</text>'
    across, up = (escape(chart[name]["title"]) for name in ("x", "y"))
    middle, low = (LEFT + WIDTH - RIGHT) / 2, HEIGHT - BOTTOM
    yield _label(middle, low + 24, "middle", across)
    yield f'<text transform="translate(12 {(TOP + low) / 2}) rotate(-90)" text-anchor="middle">{up}</text>'
    yield f'<path d="M{LEFT} {TOP}V{low}H{WIDTH - RIGHT}" fill="none" stroke="currentColor" opacity="0.4"/>'


def _legend(named: Sequence[Part], series: Sequence[Part]) -> Iterator[str]:
    beside = _beside(named)
    for i, one in enumerate(named):
        x, y = LEFT + (i % beside) * (WIDTH - LEFT) / 2, HEIGHT + 6 + 14 * (i // beside)
        colour = _colours(series)[series.index(one)]
        yield f'<rect x="{x}" y="{y - 7}" width="8" height="8" fill="{colour}"/>'
        yield f'<text x="{x + 12}" y="{y}">{escape(_title(one))}</text>'


def _beside(named: Sequence[Part]) -> int:
    """Entries of the legend in a line: as many as fit."""
    return 2 if max((len(_title(one)) for one in named), default=0) <= 30 else 1


def _title(one: Part) -> str:
    return one["name"] if one["source"] in one["name"] else f"{one['name']} ({one['source']})"
