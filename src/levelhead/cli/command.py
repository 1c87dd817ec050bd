"""Files that commands write: refused before any work, put in place in one go."""

from __future__ import annotations

import os
from pathlib import Path

from levelhead.errors import LevelheadValueError, expected

__all__ = ["STDOUT", "check_writable", "write"]

STDOUT = "-"


def check_writable(option: str, file: str | None) -> None:
    """Refuses a place where nothing can be written, before minutes of work."""
    if file is None or file == STDOUT:
        return
    path = Path(file)
    if path.is_dir():
        raise LevelheadValueError(expected(option, "a file", f"the directory {file!r}", "Name a file in it"))
    if not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        given = f"{file!r}"
        wanted = "a file in a directory that can be written to"
        raise LevelheadValueError(expected(option, wanted, given, "Make the directory first"))


def write(option: str, file: str, content: str) -> None:
    """Writes the file whole, or says why not."""
    from levelhead.runs.record import write_whole

    try:
        write_whole(Path(file), content)
    except OSError as error:
        given = f"{file!r}: {error.strerror}"
        advice = "Make room there, or name another file"
        raise LevelheadValueError(expected(option, "a place to write", given, advice)) from None
