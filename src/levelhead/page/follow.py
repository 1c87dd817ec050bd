"""The run given by `--run`: read at the start, and again whenever its file changes.

Reads what `levelhead.sinks.read` does. At the start a file that is not a complete run is an error. Later it is a file
being written, and the last complete state is kept.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

from levelhead.errors import LevelheadError
from levelhead.lab import figures
from levelhead.page.encoding import encoded
from levelhead.runs import files

PAUSE = 0.5  # seconds between two checks of the file
_PAUSE_PER_READ = 5  # the pause is at least this many times the duration of the last reading
_HEARTBEAT = 15.0  # seconds without an event after which a comment keeps the stream open


class Follower:
    """The figure of a run as it is on the disk. Safe to use from any thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._version = 0
        self._read(self._stamp())

    def now(self) -> tuple[int, bytes]:
        """A number that grows with every change, and the figure as JSON."""
        with self._lock:
            stamp = self._stamp()
            if stamp not in (None, self._last_stamp):
                with suppress(LevelheadError):  # incomplete for the moment
                    self._read(stamp)
            return self._version, self._figure

    def _stamp(self) -> tuple[int, ...] | None:
        """Changes with the file; None if it cannot be accessed."""
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns

    def _read(self, stamp: tuple[int, ...] | None) -> None:
        self._last_stamp = stamp
        began = time.monotonic()
        self._figure = encoded(figures.figure("heads", run=files.read(self._path)).json())
        self._version += 1
        # Seconds to wait before the next check: longer if reading takes long.
        self.pause = max(PAUSE, _PAUSE_PER_READ * (time.monotonic() - began))


async def events(follower: Follower, ending: Callable[[], bool]) -> AsyncIterator[bytes]:
    """Server-sent events: the figure now, and again after every change, until the server ends."""
    sent_version, silent_seconds = 0, 0.0
    while not ending():
        version, figure = await asyncio.to_thread(follower.now)
        if version != sent_version:
            sent_version, silent_seconds = version, 0.0
            yield b"data: " + figure + b"\n\n"
        elif silent_seconds >= _HEARTBEAT:
            silent_seconds = 0.0
            yield b": still here\n\n"
        silent_seconds += follower.pause
        await asyncio.sleep(follower.pause)
