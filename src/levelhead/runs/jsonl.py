"""JSON lines: a line per snapshot, on the disk before the next step begins. Needs no package.

A session begins with a line of format, version and columns. Numbers are written so that reading gives the same bits.
The file is only appended to, but half a line of a killed process is cut off before a new session writes. Several ranks
may write to one file: every line has its rank, and reading joins what they recorded of the same step.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from levelhead import cache, checks
from levelhead.errors import LevelheadValueError, bad_value
from levelhead.runs import sessions
from levelhead.runs.record import DAMAGED, Run, Snapshot, logged_in, logged_out, snapshot_in, snapshot_out

FORMAT = "levelhead-snapshots"


class JSONL:
    """Appends every snapshot to a file; `read` gives the run back.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "run.jsonl"
    >>> sink = JSONL(path)
    >>> sink(Snapshot(0, ()))
    >>> sink.close()
    >>> read(path).snapshots
    (Snapshot(step=0, records=()),)
    """

    def __init__(self, path: str | os.PathLike[str], *, model: str = "") -> None:
        self.path = checks.path("path", path)
        self._rank = sessions.rank()
        with cache.writing("path", self.path):
            if self.path.exists() and self.path.stat().st_size:
                read_header(self.path)  # before anything is changed: it may be another file
                _cut_half_a_line(self.path)
            self._file = self.path.open("a", encoding="utf-8")
        self._write(sessions.header(FORMAT, model))

    def __call__(self, snapshot: Snapshot) -> None:
        self._write(snapshot_out(snapshot))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Appends numbers of a step, such as its loss."""
        self._write({"logged": logged_out({name: [(step, x)] for name, x in numbers.items()})})

    def _write(self, line: dict[str, Any]) -> None:
        if self._rank is not None:
            line = {**line, "rank": self._rank}
        # In one piece, so that a process killed here leaves half a line at most, and ranks do not mix.
        self._file.write(json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file; a second time does nothing."""
        self._file.close()


def read(path: str | os.PathLike[str]) -> Run:
    """The run in the file; half a last line is left out, with a note in the run."""
    path = Path(path)
    read_header(path)
    parts: list[sessions.Session] = []
    newest: dict[int | None, sessions.Session] = {}  # by rank
    notes = []
    lines = path.read_bytes().split(b"\n")
    if lines[-1]:
        notes.append(f"line {len(lines)} was cut off while it was written, and is left out")
    for number, line in enumerate(lines[:-1], 1):
        try:
            content = json.loads(line)
            rank = content.get("rank")
            if "format" in content:
                newest[rank] = sessions.Session(sessions.check(content, FORMAT, path), rank)
                parts.append(newest[rank])
            elif "logged" in content:
                newest[rank].log(logged_in(content["logged"]))
            else:
                newest[rank].snapshots.append(snapshot_in(content))
        except LevelheadValueError:
            raise
        except DAMAGED as error:
            advice = "The file was changed after it was written; delete that line or record again"
            raise bad_value(str(path), "snapshots", f"line {number}: {error!r}", advice) from error
    return sessions.join(parts, notes)


def read_header(path: Path) -> dict[str, Any]:
    """The first line; an error if this is no file of snapshots, or one of another version."""
    with path.open("rb") as file:
        line = file.readline(1 << 16)
    try:
        header = json.loads(line) if line.endswith(b"\n") else None
    except (RecursionError, ValueError):
        header = None
    return sessions.check(header, FORMAT, path)


def _cut_half_a_line(path: Path) -> None:
    with path.open("rb+") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            whole = text.rfind(b"\n") + 1
        file.truncate(whole)
