"""Progress of a benchmark, by cell."""

from __future__ import annotations

from levelhead.terminal import Bar

LIMITS = "limits"  # the machine's own, measured before the first cell


class Progress(Bar):
    _cell = ""  # the one that is measured

    def tell(self, cell: str, doing: str) -> None:
        """Shows what is measured now; a cell with a new name means that the one before is finished."""
        new = cell != self._cell
        if new and self._cell not in ("", LIMITS):
            self.finished += 1
        self._cell = cell
        self.draw(self.finished, f"{cell}: {doing}")
        if new:
            self.log(cell, None if cell == LIMITS else self.finished + 1)
