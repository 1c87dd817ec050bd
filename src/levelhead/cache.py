"""Files that levelhead can make again: where they are, how they are written whole, and locks between processes."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
    """Writes a file and renames it into place, so that no reader finds half of it.

    A link stays a link, and an existing file keeps its mode and its owner. A pipe or a device is written to: renaming
    would put a file in its place.
    """
    content = text.encode()
    try:
        known = path.stat()
    except FileNotFoundError:
        known = None
    if known is not None and not stat.S_ISREG(known.st_mode):
        with path.open("wb") as there:
            there.write(content)
        return
    target = Path(os.path.realpath(path))
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        if known is not None:
            with suppress(PermissionError):  # only root may give a file away
                os.chown(name, known.st_uid, known.st_gid)
        os.chmod(name, 0o666 & ~_umask() if known is None else stat.S_IMODE(known.st_mode))
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def write_named(argument: str, path: str | Path, text: str) -> None:
    """`write_whole`; if that fails, the error names the argument and the reason."""
    with writing(argument, path):
        write_whole(Path(path), text)


@contextmanager
def writing(argument: str, path: str | Path) -> Iterator[None]:
    """Around what writes to a path of the user's: errors of the system name the argument."""
    try:
        yield
    except OSError as error:
        given, advice = f"{str(path)!r}: {error.strerror or error}", "Make the directory or room there, or name another"
        raise bad_value(argument, "a place to write", given, advice) from error


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
