"""How far the lab is, on stderr: one bar on a terminal, a line per finished claim anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TextIO

from levelhead.lab.result import Result

_BAR = 24  # characters
_COLUMNS = 100
_PAUSE = 0.05  # seconds between two drawings: a terminal is not a film


class Progress:
    def __init__(self, ids: Sequence[str], stream: TextIO | None = None) -> None:
        self._shares = dict.fromkeys(ids, 0.0)
        self._finished = 0
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._begin, self._drawn = time.monotonic(), 0.0

    def tell(self, id: str, share: float, words: str) -> None:
        """A claim got on."""
        self._shares[id] = min(max(share, 0.0), 1.0)
        now = time.monotonic()
        if self._terminal and now - self._drawn > _PAUSE:
            self._drawn = now
            done = "█" * int(_BAR * sum(self._shares.values()) / len(self._shares))
            line = f"{done:░<{_BAR}} {self._finished}/{len(self._shares)} {id}: {words}"
            print(f"\r\x1b[2K{line[:_COLUMNS]}", end="", file=self._stream, flush=True)

    def finished(self, result: Result) -> None:
        """A claim has its verdict."""
        self._shares[result.id] = 1.0
        self._finished += 1
        if not self._terminal:
            minutes, seconds = divmod(int(time.monotonic() - self._begin), 60)
            at = f"{minutes:3d}:{seconds:02d} {self._finished}/{len(self._shares)}"
            print(f"{at} {result.id} {result.verdict}", file=self._stream, flush=True)

    def clear(self) -> None:
        """Makes room for something that is printed."""
        if self._terminal:
            print("\r\x1b[2K", end="", file=self._stream, flush=True)
