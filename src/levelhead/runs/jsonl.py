"""JSON lines: a line per snapshot, on the disk before the next step begins. Needs no package.

A session begins with a line of format, version and columns. Numbers are written so that reading gives the same bits.
The file is only appended to, but half a line of a killed process is cut off before a new session writes.
"""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path
from typing import Any

from levelhead.errors import LevelheadValueError, bad_value
from levelhead.runs import sessions
from levelhead.runs.record import Run, Snapshot, snapshot_in, snapshot_out

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
        self.path = Path(path)
        if self.path.exists() and self.path.stat().st_size:
            read_header(self.path)  # before anything is changed: it may be another file
            _cut_half_a_line(self.path)
        self._file = self.path.open("a", encoding="utf-8")
        self._write(sessions.header(FORMAT, model))

    def __call__(self, snapshot: Snapshot) -> None:
        self._write(snapshot_out(snapshot))

    def _write(self, line: dict[str, Any]) -> None:
        # In one piece, so that a process killed here leaves half a line at most.
        self._file.write(json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file; a second time does nothing."""
        self._file.close()


def read(path: str | os.PathLike[str]) -> Run:
    """The run in the file; half a last line is left out, with a note in the run."""
    path = Path(path)
    read_header(path)
    parts: list[tuple[dict[str, Any], list[Snapshot]]] = []
    notes = []
    lines = path.read_bytes().split(b"\n")
    if lines[-1]:
        notes.append(f"line {len(lines)} was cut off while it was written, and is left out")
    for number, line in enumerate(lines[:-1], 1):
        try:
            content = json.loads(line)
            if "format" in content:
                parts.append((sessions.check(content, FORMAT, path), []))
            else:
                parts[-1][1].append(snapshot_in(content))
        except LevelheadValueError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            advice = "The file was changed after it was written; delete that line or record again"
            raise bad_value(str(path), "snapshots", f"line {number}: {error!r}", advice) from error
    return sessions.join(parts, notes)


def read_header(path: Path) -> dict[str, Any]:
    """The first line; an error if this is no file of snapshots, or one of another version."""
    with path.open("rb") as file:
        line = file.readline(1 << 16)
    try:
        header = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        header = None
    return sessions.check(header, FORMAT, path)


def _cut_half_a_line(path: Path) -> None:
    with path.open("rb+") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            whole = text.rfind(b"\n") + 1
        file.truncate(whole)
