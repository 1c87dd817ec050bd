"""Files that levelhead can make again: where they are, how large and how they are removed, how they are written whole,
and locks between processes.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from levelhead.errors import bad_value

_ADVICE = "Set LEVELHEAD_CACHE to a directory that can be written to"


@dataclass(frozen=True)
class Part:
    """A directory of the cache."""

    name: str
    holds: str  # in words
    made: str  # the names of what levelhead puts there: anything else belongs to somebody else, and is left

    def entries(self) -> list[Path]:
        folder = directory(self.name)
        try:
            names = os.listdir(folder)  # a glob takes a folder that it may not read for an empty one, since Python 3.13
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(folder / name for name in names if re.fullmatch(self.made, name))


# What lies inside another one comes before it.
PARTS = (
    Part("gguf", "models of GGUF files, de-quantised", r".*-[0-9a-f]{32}-\d+|\.making-\w+"),
    Part("lab/training", "trainings of the lab", r"\.?[\w-]+-[0-9a-f]{24}\.(json(\.\w+)?|lock)"),
    Part("lab", "results of claims", r"\.?\w+-[0-9a-f]{32}\.json(\.\w+)?"),
)


def directory(*parts: str) -> Path:
    """The cache, or a directory in it: under LEVELHEAD_CACHE, else in the user's cache directory."""
    chosen = os.environ.get("LEVELHEAD_CACHE")
    if chosen:
        return Path(os.path.expanduser(chosen)).joinpath(*parts)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(base or Path.home() / ".cache").joinpath("levelhead", *parts)
    except RuntimeError as error:  # a container's user may have neither HOME nor an entry in the list of users
        raise bad_value("cache", "a cache directory", "no home directory", _ADVICE) from error


def sizes() -> dict[str, int]:
    """Bytes in each part of the cache; parts without a file are left out. A cache that cannot be read is an error."""
    with _errors_named():
        kept = {part.name: part.entries() for part in PARTS}
    return {name: sum(map(_bytes, entries)) for name, entries in kept.items() if entries}


def clear() -> None:
    """Removes what levelhead keeps, and directories that are empty then. Files of others are left."""
    with _errors_named():
        for part in PARTS:
            for entry in part.entries():
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink(missing_ok=True)
        for folder in (*(directory(part.name) for part in PARTS), directory()):
            with suppress(OSError):  # not there, or not empty
                folder.rmdir()


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
            with suppress(PermissionError, AttributeError):  # only root may give a file away, and Windows cannot
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
    check_writable(file.parent)
    with _errors_named():
        lock = file.open("w")
    with lock:
        yield _lock(lock.fileno(), wait)


def _lock(file: int, wait: bool) -> bool:
    """Whether the open file is locked for this process now. The system unlocks it when it is closed."""
    if sys.platform == "win32":
        import msvcrt

        while True:
            try:
                msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
            except OSError:
                if not wait:
                    return False
                time.sleep(0.1)  # waiting is limited to ten seconds there
            else:
                return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


@contextmanager
def _errors_named() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise bad_value("cache", "a cache directory", error, _ADVICE) from error


def _bytes(entry: Path) -> int:
    """What a file, or all files of a directory, take; 0 for what has gone meanwhile."""
    inside = entry.rglob("*") if entry.is_dir() and not entry.is_symlink() else (entry,)
    total = 0
    for file in inside:
        with suppress(OSError):
            total += file.lstat().st_size
    return total


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
