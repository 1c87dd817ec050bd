"""Tables of numbers in a terminal: aligned columns, cells coloured by weight, a window where not everything fits.

Widths are those of a terminal: a wide character takes two columns, a combining one none. A coloured cell sets both
foreground and background, so that it is legible on dark and light terminals.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from levelhead.explanation.head_report import HeadReport
from levelhead.explanation.head_steps import Array

# From pale to dark, of the 256 colours of terminals; a step for every tenth or so of the weight.
_BACKGROUND = (230, 193, 151, 115, 79, 37, 31, 25, 18)
_WHITE_TEXT_FROM = 6  # from this step on the background is dark
_FAINT = 0.01  # a weight below is not coloured
_READABLE = 6  # columns of a cell in a cut table, so that the names above stay readable
ROWS = 24  # of a table that are shown
_NAME = 12  # columns that a token's name may take at most


def room_of(text: str) -> int:
    """Columns a text takes in a terminal."""
    return sum(map(_room, text))


def _room(c: str) -> int:
    if unicodedata.combining(c):
        return 0
    return 2 if unicodedata.east_asian_width(c) in "WF" else 1


def cut(text: str, room: int) -> str:
    """The text, or its beginning and … where it would take more than `room` columns."""
    if room_of(text) <= room:
        return text
    kept, left = "", room - 1
    for c in text:
        if (left := left - _room(c)) < 0:
            break
        kept += c
    return kept + "…"


def fitted(text: str, room: int, *, right: bool = False) -> str:
    """The text in exactly `room` columns."""
    text = cut(text, room)
    gap = " " * (room - room_of(text))
    return gap + text if right else text + gap


def _painted(cell: str, weight: float, colour: bool, *, solid: bool = False) -> str:
    """A cell on the background of its weight; solid: the text has the same colour."""
    if not colour or not weight >= _FAINT:
        return cell
    step = min(int(weight * len(_BACKGROUND)), len(_BACKGROUND) - 1)
    ink = _BACKGROUND[step] if solid else 231 if step >= _WHITE_TEXT_FROM else 16
    return f"\x1b[38;5;{ink};48;5;{_BACKGROUND[step]}m{cell}\x1b[0m"


def window(size: int, shown: int, around: int) -> range:
    """At most `shown` of `size` positions, with `around` in the middle where possible."""
    shown = min(size, max(shown, 1))
    begin = min(max(around - shown // 2, 0), size - shown)
    return range(begin, begin + shown)


@dataclass(frozen=True)
class Layout:
    """Which rows and columns of a table are shown, how wide a cell is, with how many digits."""

    rows: range
    columns: range
    cell: int
    digits: int


def layout(report: HeadReport, values: Array, digits: range, width: int) -> Layout:
    """As many digits as let all columns fit; where none do, a window of readable columns."""
    T, S = values.shape
    room = width - _names_room(report) - 3
    cells = {n: 1 + max(len(_shown(x, n)) for x in np.unique(values)) for n in reversed(digits)}
    fitting = next((n for n, cell in cells.items() if cell * S <= room), None)
    chosen = max(digits.start, 1) if fitting is None else fitting
    cell = max(cells[chosen], _READABLE) if fitting is None else cells[chosen]
    return Layout(window(T, ROWS, report.row), window(S, room // cell, report.row), cell, chosen)


def _names_room(report: HeadReport) -> int:
    """Columns for the names of the rows, without the space around them."""
    return min(max(map(room_of, report.head.queries)), _NAME)


def _row_name(report: HeadReport, row: int) -> str:
    room = _names_room(report)
    return fitted(cut(report.head.queries[row], room), room + 2, right=True) + " "


def table(
    report: HeadReport, values: Array, names: Sequence[str], weights: Array, digits: range, *, colour: bool, width: int
) -> Iterator[str]:
    """A line of column names, then a line per row; all lines have the same width. `weights` colour the cells."""
    shown = layout(report, values, digits, width)
    titles = (fitted(cut(names[j], shown.cell - 1), shown.cell, right=True) for j in shown.columns)
    yield " " * (_names_room(report) + 3) + "".join(titles)
    for i in shown.rows:
        cells = (f"{_shown(values[i, j], shown.digits):>{shown.cell}}" for j in shown.columns)
        painted = (_painted(cell, weights[i, j], colour) for cell, j in zip(cells, shown.columns, strict=True))
        yield _row_name(report, i) + "".join(painted)


def _shown(value: float, digits: int) -> str:
    """A dot for a hidden key; a number that rounds to zero has no sign."""
    return "·" if value == -np.inf else f"{round(float(value), digits) + 0.0:.{digits}f}"


_GAP = "   "  # between two tables side by side
_PERCENT, _SHADE = 5, 2  # columns of a cell, with a number in it or a shade
_SHADES = ((0.0, "·"), (0.05, "░"), (0.2, "▒"), (0.5, "▓"), (0.8, "█"))


def beside(report: HeadReport, *, colour: bool, width: int) -> Iterator[str]:
    """The weights with and without the scale, side by side: in per cent, or as shades where those do not fit."""
    head, sides = report.head, report.head.sides
    T, S = head.weights.shape
    margin = " " * (_names_room(report) + 3)
    spare = width - len(margin) - len(_GAP)
    cell = _PERCENT if spare >= 2 * _PERCENT * S else _SHADE
    columns = window(S, spare // (2 * cell), report.row)
    yield margin + _GAP.join(fitted(title, cell * len(columns)) for title, _, _ in sides)
    if cell == _PERCENT:
        words = "".join(fitted(" " + head.keys[j], cell, right=True) for j in columns)
        yield margin + words + _GAP + words
    for i in window(T, ROWS, report.row):
        halves = ("".join(_in_cell(weights[i, j], cell, colour) for j in columns) for _, weights, _ in sides)
        yield _row_name(report, i) + _GAP.join(halves)
    if cell == _SHADE:
        yield margin + ", ".join(f"{glyph * _SHADE} from {low:g}" for low, glyph in _SHADES[1:])


def _in_cell(weight: float, cell: int, colour: bool) -> str:
    if cell == _PERCENT:
        return _painted(f"{100 * weight:>{cell}.0f}", weight, colour)
    shade = next(glyph for low, glyph in reversed(_SHADES) if not weight < low)
    return _painted(shade * cell, weight, colour, solid=True)


def bar(weight: float, room: int) -> str:
    """A bar of eighths; a weight of 1 fills the room."""
    whole, rest = divmod(round(min(max(weight, 0.0), 1.0) * room * 8), 8)
    return fitted("█" * whole + ("▏▎▍▌▋▊▉"[rest - 1] if rest else ""), room)
