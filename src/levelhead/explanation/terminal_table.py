"""Tables of numbers in a terminal: aligned columns, cells coloured by weight, a window where not everything fits.

Widths are those of a terminal: a wide character takes two columns, a combining one none. A coloured cell sets both
foreground and background, so that it is legible on dark and light terminals.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from levelhead.explanation.head_steps import Array

# From pale to dark, of the 256 colours of terminals; a step for every tenth or so of the weight.
_BACKGROUND = (230, 193, 151, 115, 79, 37, 31, 25, 18)
_WHITE_TEXT_FROM = 6  # from this step on the background is dark
_FAINT = 0.01  # a weight below is not coloured
_READABLE = 6  # columns of a cell in a cut table, so that the names above stay readable
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


def names_room(names: Sequence[str]) -> int:
    """Columns for the names of the rows."""
    return min(max(map(room_of, names)), _NAME)


@dataclass(frozen=True)
class Layout:
    """Which rows and columns of a table are shown, how wide a cell is, with how many digits."""

    rows: range
    columns: range
    cell: int
    digits: int
    margin: int  # in front of the numbers: the rows' names


def layout(values: Array, names: Sequence[str], *, digits: range, width: int, rows: int, around: int) -> Layout:
    """As many digits as let all columns fit; where none do, a window of readable columns."""
    margin = names_room(names) + 3
    T, S = values.shape
    cells = {n: 1 + max(len(_shown(x, n)) for x in np.unique(values)) for n in reversed(digits)}
    fitting = next((n for n, cell in cells.items() if margin + cell * S <= width), None)
    chosen = max(digits.start, 1) if fitting is None else fitting
    cell = max(cells[chosen], _READABLE) if fitting is None else cells[chosen]
    return Layout(window(T, rows, around), window(S, (width - margin) // cell, around), cell, chosen, margin)


def table(
    values: Array, names: tuple[Sequence[str], Sequence[str]], weights: Array, layout: Layout, *, colour: bool
) -> Iterator[str]:
    """A line of column names, then a line per row; all lines have the same width."""
    rows, columns = names
    titles = (fitted(cut(columns[j], layout.cell - 1), layout.cell, right=True) for j in layout.columns)
    yield " " * layout.margin + "".join(titles)
    for i in layout.rows:
        cells = (
            _painted(f"{_shown(values[i, j], layout.digits):>{layout.cell}}", weights[i, j], colour)
            for j in layout.columns
        )
        yield fitted(cut(rows[i], layout.margin - 3), layout.margin - 1, right=True) + " " + "".join(cells)


def _shown(value: float, digits: int) -> str:
    """A dot for a hidden key; a number that rounds to zero has no sign."""
    return "·" if value == -np.inf else f"{round(float(value), digits) + 0.0:.{digits}f}"


_GAP = "   "  # between two tables side by side
_PERCENT, _SHADE = 5, 2  # columns of a cell, with a number in it or a shade
_SHADES = ((0.0, "·"), (0.05, "░"), (0.2, "▒"), (0.5, "▓"), (0.8, "█"))


def beside(
    tables: Mapping[str, Array],
    names: tuple[Sequence[str], Sequence[str]],
    *,
    colour: bool,
    width: int,
    rows: int,
    around: int,
) -> Iterator[str]:
    """Two tables of weights, by title, side by side: in per cent, or as shades where those do not fit."""
    T, S = len(names[0]), len(names[1])
    room = names_room(names[0])
    margin = " " * (room + 3)
    spare = width - room - 3 - len(_GAP)
    cell = _PERCENT if spare >= 2 * _PERCENT * S else _SHADE
    columns = window(S, spare // (2 * cell), around)
    yield margin + _GAP.join(fitted(title, cell * len(columns)) for title in tables)
    if cell == _PERCENT:
        words = "".join(fitted(" " + names[1][j], cell, right=True) for j in columns)
        yield margin + words + _GAP + words
    for i in window(T, rows, around):
        halves = ("".join(_in_cell(x[i, j], cell, colour) for j in columns) for x in tables.values())
        yield f"{fitted(names[0][i], room + 2, right=True)} " + _GAP.join(halves)
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
