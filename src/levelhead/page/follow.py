"""The run given by `--run`: read at the start, and again whenever its file changes.

Reads what `watch(...).save`, `levelhead doctor --json` and the JSONL sink write. At the start a
file that is not a whole run is an error; later it is a file being written, and the last good state
stands. Nothing here writes, and the file's name never comes from a browser.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeAlias

from levelhead.errors import LevelheadError, LevelheadValueError, expected
from levelhead.page.headers import encoded
from levelhead.runs import jsonl, record
from levelhead.runs.record import Run

__all__ = ["Follower", "Render", "events"]

Render: TypeAlias = Callable[[Run], dict[str, object]]  # a run -> the JSON of its figure

PAUSE = 0.5  # seconds between two looks at the file
_SHARE = 5  # of the time, at most one part goes into reading
_HEARTBEAT = 15.0  # seconds after which a silent stream says that it is there


class Follower:
    """The figure of a run as it is on the disk now. Any thread may ask."""

    def __init__(self, path: Path, render: Render) -> None:
        self._path, self._render = path, render
        self._lock = threading.Lock()
        self._seen: tuple[int, ...] | None = None
        self._version = 0
        self._pause = PAUSE
        self._read(self._stamp())

    @property
    def pause(self) -> float:
        """Seconds to wait before looking again: longer where reading takes long."""
        return self._pause

    def now(self) -> tuple[int, bytes]:
        """A number that grows with every change, and the figure as JSON."""
        with self._lock:
            try:
                stamp = self._stamp()
                if stamp != self._seen:
                    self._read(stamp)
            except LevelheadError:  # half written, or gone for a moment
                pass
            return self._version, self._figure

    def _stamp(self) -> tuple[int, ...]:
        try:
            found = self._path.stat()
        except OSError as error:
            raise _wrong(self._path, error.strerror or str(error), "Check the path") from None
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _read(self, stamp: tuple[int, ...]) -> None:
        self._seen = stamp
        began = time.monotonic()
        self._figure = encoded(self._render(read(self._path)))
        self._version += 1
        self._pause = max(PAUSE, _SHARE * (time.monotonic() - began))


def read(path: Path) -> Run:
    """The run in a file, whichever of the two formats it has."""
    try:
        with path.open("rb") as file:
            head = file.read(80)
        return jsonl.read(path) if jsonl.FORMAT.encode() in head else record.load(path)
    except LevelheadError:
        raise
    except OSError as error:
        raise _wrong(path, error.strerror or str(error), "Check the path") from None
    except (AttributeError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError):
        advice = "The file was cut off or changed; record it again"
        raise _wrong(path, "another, or half of one", advice) from None


async def events(follower: Follower, ended: threading.Event) -> AsyncIterator[bytes]:
    """Server-sent events: the figure now, and again after every change, until the server ends."""
    sent, silent = 0, 0.0
    while not ended.is_set():
        version, figure = await asyncio.to_thread(follower.now)
        if version != sent:
            sent, silent = version, 0.0
            yield b"data: " + figure + b"\n\n"
        elif silent >= _HEARTBEAT:
            silent = 0.0
            yield b": still here\n\n"
        silent += follower.pause
        await asyncio.sleep(follower.pause)


def _wrong(path: Path, given: str, advice: str) -> LevelheadValueError:
    wanted = "a run that watch(...).save, levelhead doctor --json or the JSONL sink wrote"
    return LevelheadValueError(expected(f"--run {path}", wanted, given, advice))
