"""Files that levelhead can make again: where they are, how they are written whole, and locks between processes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from levelhead.errors import bad_value


def directory(*parts: str) -> Path:
    """The cache, or a directory in it: under LEVELHEAD_CACHE, else in the user's cache directory."""
    chosen = os.environ.get("LEVELHEAD_CACHE")
    if chosen:
        return Path(chosen).expanduser().joinpath(*parts)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).joinpath("levelhead", *parts)


def check_writable(folder: Path) -> None:
    """Makes a directory of the cache if need be. If that is not possible, the error names LEVELHEAD_CACHE."""
    with _errors_named():
        folder.mkdir(parents=True, exist_ok=True)


def unfinished(folder: Path) -> Path:
    """A new directory beside the finished ones, to be renamed when its content is complete."""
    check_writable(folder)
    with _errors_named():
        return Path(tempfile.mkdtemp(prefix=".making-", dir=folder))


def write_whole(path: Path, text: str) -> None:
    """Writes a file and renames it into place, so that no reader finds half of it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


@contextmanager
def locked(file: Path, *, wait: bool) -> Iterator[bool]:
    """Locks a file against other processes. Yields False if it is locked already and `wait` is False."""
    import fcntl  # not on Windows

    check_writable(file.parent)
    with _errors_named():
        lock = file.open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


@contextmanager
def _errors_named() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        advice = "Set LEVELHEAD_CACHE to a directory that can be written to"
        raise bad_value("cache", "a cache directory", error, advice) from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
