"""Tables of numbers in a terminal: columns that line up, cells coloured by weight, a window where
not everything fits.

Widths are those of a terminal: a wide character takes two columns, a combining one none. Ink and
paper of a coloured cell are both set, so that it reads on dark and light terminals alike.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from levelhead.explanation.head_steps import Array

__all__ = ["Layout", "bar", "beside", "cut", "fitted", "laid_out", "room_of", "table", "window"]

# From pale to dark, of the 256 that terminals have; a step for every tenth or so of the weight.
_PAPER = (230, 193, 151, 115, 79, 37, 31, 25, 18)
_WHITE_INK_FROM = 6  # from this step on the paper is dark
_FAINT = 0.01  # a weight below is not coloured
_READABLE = 6  # columns of a cell that has a choice, for the sake of the names above
_NAME = 12  # columns that a token's name may take at most


def room_of(text: str) -> int:
    """Columns a text takes in a terminal."""
    return sum(_room(c) for c in text)


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


def painted(cell: str, weight: float, colour: bool, *, solid: bool = False) -> str:
    """A cell on the paper of its weight; solid: its ink is the paper's colour."""
    if not colour or not weight >= _FAINT:
        return cell
    step = min(int(weight * len(_PAPER)), len(_PAPER) - 1)
    ink = _PAPER[step] if solid else 231 if step >= _WHITE_INK_FROM else 16
    return f"\x1b[38;5;{ink};48;5;{_PAPER[step]}m{cell}\x1b[0m"


@dataclass(frozen=True)
class Layout:
    """Which rows and columns of a table are shown, how wide a cell is, with how many digits."""

    rows: range
    columns: range
    cell: int
    digits: int
    margin: int  # in front of the numbers: the rows' names


def window(size: int, shown: int, around: int) -> range:
    """At most `shown` of `size` places, with `around` in their middle where that is possible."""
    shown = min(size, max(shown, 1))
    begin = min(max(around - shown // 2, 0), size - shown)
    return range(begin, begin + shown)


def laid_out(values: Array, names: Sequence[str], *, digits: range, width: int, rows: int, around: int) -> Layout:
    """As many digits as let all columns fit; where none do, a window of readable columns."""
    margin = min(max(map(room_of, names)), _NAME) + 3
    T, S = values.shape
    cells = {n: _cell(values, n) for n in reversed(digits)}
    fits = (n for n, cell in cells.items() if margin + cell * S <= width)
    wanted = next(fits, None)
    if wanted is None:
        wanted = max(digits.start, 1)
        cell = max(cells[wanted], _READABLE)
    else:
        cell = cells[wanted]
    shown = (width - margin) // cell
    return Layout(window(T, rows, around), window(S, shown, around), cell, wanted, margin)


def _cell(values: Array, digits: int) -> int:
    """Columns that the longest number and a space before it take."""
    return 1 + max(len(_shown(x, digits)) for x in np.unique(values))


def table(
    values: Array, names: tuple[Sequence[str], Sequence[str]], weights: Array, layout: Layout, *, colour: bool
) -> Iterator[str]:
    """A line of column names, then a line per row; all lines take the same room."""
    rows, columns = names
    titles = (fitted(cut(columns[j], layout.cell - 1), layout.cell, right=True) for j in layout.columns)
    yield " " * layout.margin + "".join(titles)
    for i in layout.rows:
        cells = (
            painted(f"{_shown(values[i, j], layout.digits):>{layout.cell}}", weights[i, j], colour)
            for j in layout.columns
        )
        yield (fitted(cut(rows[i], layout.margin - 3), layout.margin - 1, right=True) + " " + "".join(cells))


def _shown(value: float, digits: int) -> str:
    """Hidden is a dot; what rounds to zero has no sign."""
    if value == -np.inf:
        return "·"
    return f"{round(float(value), digits) + 0.0:.{digits}f}"


_GAP = "   "  # between two tables side by side
_PERCENT, _SHADE = 5, 2  # columns of a cell, with a number in it or a shade
_SHADES = ((0.0, "·"), (0.05, "░"), (0.2, "▒"), (0.5, "▓"), (0.8, "█"))


def beside(
    left: Array,
    right: Array,
    names: tuple[Sequence[str], Sequence[str]],
    titles: tuple[str, str],
    *,
    colour: bool,
    width: int,
    rows: int,
    around: int,
) -> Iterator[str]:
    """Two tables of weights side by side: in per cent, or as shades where those do not fit."""
    T, S = left.shape
    room = min(max(map(room_of, names[0])), _NAME)
    spare = width - room - 3 - len(_GAP)
    cell = _PERCENT if spare >= 2 * _PERCENT * S else _SHADE
    columns = window(S, spare // (2 * cell), around)
    half = cell * len(columns)
    yield " " * (room + 3) + fitted(titles[0], half) + _GAP + fitted(titles[1], half)
    if cell == _PERCENT:
        words = "".join(fitted(" " + names[1][j], cell, right=True) for j in columns)
        yield " " * (room + 3) + words + _GAP + words
    for i in window(T, rows, around):
        halves = ("".join(_in_cell(x[i, j], cell, colour) for j in columns) for x in (left, right))
        yield f"{fitted(names[0][i], room + 2, right=True)} " + _GAP.join(halves)
    if cell == _SHADE:
        steps = ", ".join(f"{glyph * _SHADE} from {low:g}" for low, glyph in _SHADES[1:])
        yield " " * (room + 3) + steps


def _in_cell(weight: float, cell: int, colour: bool) -> str:
    if cell == _PERCENT:
        return painted(f"{100 * weight:>{cell}.0f}", weight, colour)
    shade = next(glyph for low, glyph in reversed(_SHADES) if not weight < low)
    return painted(shade * cell, weight, colour, solid=True)


def bar(weight: float, room: int) -> str:
    """A bar of eighths; a weight of 1 fills the room."""
    eighths = round(min(max(weight, 0.0), 1.0) * room * 8)
    whole, rest = divmod(eighths, 8)
    return fitted("█" * whole + ("▏▎▍▌▋▊▉"[rest - 1] if rest else ""), room)
