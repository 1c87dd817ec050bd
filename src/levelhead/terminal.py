"""The terminal: when to use colour, how wide it is, messages and progress on stderr. No other module writes escapes to
move or to clear a line."""

from __future__ import annotations

import io
import os
import shutil
import sys
import time
from typing import TextIO

NARROW = 80  # columns; output is laid out for no fewer
_WIDE = 100  # columns, where there is no terminal to measure
_BAR = 24  # characters
# Of the sixteen colours that every terminal has, in an order that colour-blind readers can follow too.
_LEVELS = {"flat": 36, "level": 32, "sharp": 33, "saturated": 35, "none": 2}
_SEVERITIES = {"error": 31, "warning": 33, "note": 2}
_VERDICTS = {"confirmed": 32, "caveat": 33, "refuted": 31, "undecided": 90}
_COLOURS = _LEVELS | _SEVERITIES | _VERDICTS | {"bold": 1}


def colour_wanted(stream: TextIO) -> bool:
    """Whether to use colour: on a terminal, unless NO_COLOR (no-color.org) is set."""
    return _reads_escapes(stream) and not os.environ.get("NO_COLOR")


def _reads_escapes(stream: TextIO) -> bool:
    """A terminal that calls itself dumb, as in editors, shows escapes as letters."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def paint(words: str, style: str, colour: bool) -> str:
    """The words in the colour of a level, a severity or a verdict, or bold; unchanged without colour."""
    return f"\x1b[{_COLOURS[style]}m{words}\x1b[0m" if colour else words


def width_of(width: int | None = None) -> int:
    """The requested columns, or those of the terminal; at least NARROW."""
    return max(NARROW, columns() if width is None else width)


def columns() -> int:
    """Those of the terminal, however few, for plain sentences, which can be wrapped anywhere."""
    return shutil.get_terminal_size((_WIDE, 24)).columns


def replace_what_cannot_be_encoded() -> None:
    """From now on stdout writes ? where its encoding has no character, as in an old locale, instead of an error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def write_utf8() -> None:
    """From now on stdout has the encoding of the files that are written: nothing of them is replaced."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")


def message(words: object) -> None:
    """A line for people, on stderr."""
    print(f"levelhead: {words}", file=sys.stderr, flush=True)


class StatusLine:
    """One line of stderr that is drawn again and again. Prints nothing where there is no terminal that can do that."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = sys.stderr if stream is None else stream
        self.on_terminal = _reads_escapes(self.stream)

    def show(self, words: str) -> None:
        """Replaces the line; what is wider than the terminal is cut, as a wrapped line cannot be replaced."""
        if self.on_terminal:
            print(f"\r\x1b[2K{words[: columns()]}", end="", file=self.stream, flush=True)

    def clear(self) -> None:
        """Clears the line, before something else is printed."""
        self.show("")


class Bar(StatusLine):
    """Progress over a number of items: a bar on a terminal, elsewhere one line per item with the time so far."""

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self.total, self.finished = total, 0
        self._begin = time.monotonic()

    def draw(self, reached: float, words: str) -> None:
        """The bar at `reached` of the total items, which may be a fraction."""
        filled = "█" * int(_BAR * reached / max(self.total, 1))
        self.show(f"{filled:░<{_BAR}} {self.finished}/{self.total} {words}")

    def log(self, words: str, number: int | None) -> None:
        """The line for item `number`, or for something that is no item, where there is no terminal."""
        if not self.on_terminal:
            minutes, seconds = divmod(int(time.monotonic() - self._begin), 60)
            count = "" if number is None else f"{number}/{self.total} "
            print(f"{minutes:3d}:{seconds:02d} {count}{words}", file=self.stream, flush=True)
