"""How far the benchmark is, on stderr: a bar on a terminal, a line per case anywhere else."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_BAR = 24  # characters


class Progress:
    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self._total = total
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._case, self._number = "", 0
        self._begin = time.monotonic()

    def tell(self, case: str, doing: str) -> None:
        """Somebody's turn in a case."""
        new = case != self._case
        if new and self._case not in ("", "limits"):
            self._number += 1
        self._case = case
        if self._terminal:
            done = "█" * (self._number * _BAR // max(self._total, 1))
            line = f"{done:░<{_BAR}} {self._number}/{self._total} {case}: {doing}"
            print(f"\r\x1b[2K{line[:120]}", end="", file=self._stream, flush=True)
        elif new:
            minutes, seconds = divmod(int(time.monotonic() - self._begin), 60)
            at = f"{self._number + 1}/{self._total} " if case != "limits" else ""
            print(f"{minutes:3d}:{seconds:02d} {at}{case}", file=self._stream, flush=True)

    def close(self) -> None:
        if self._terminal:
            print("\r\x1b[2K", end="", file=self._stream, flush=True)
