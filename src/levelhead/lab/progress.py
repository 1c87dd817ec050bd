"""Progress of the lab, by claim."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TextIO

from levelhead.terminal import Bar

_PAUSE = 0.05  # seconds between two drawings; experiments report far more often


class Progress(Bar):
    def __init__(self, ids: Sequence[str], stream: TextIO | None = None) -> None:
        super().__init__(len(ids), stream)
        self._shares = dict.fromkeys(ids, 0.0)
        self._drawn = 0.0

    def tell(self, id: str, share: float, words: str) -> None:
        """Shows which share of a claim is measured."""
        self._shares[id] = min(max(share, 0.0), 1.0)
        now = time.monotonic()
        if now - self._drawn > _PAUSE:
            self._drawn = now
            self.draw(sum(self._shares.values()), f"{id}: {words}")

    def add(self, id: str, verdict: str) -> None:
        """Counts a claim that has its verdict."""
        self._shares[id] = 1.0
        self.finished += 1
        self.log(f"{id} {verdict}", self.finished)
