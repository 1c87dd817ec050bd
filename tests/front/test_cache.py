"""The cache: where it is, files written whole, locks, the error where it cannot be, how large it is and its removal."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import pytest

from levelhead import cache
from levelhead.cli.main import main
from levelhead.errors import LevelheadValueError
from levelhead.info import info
from levelhead.lab import registry, result_cache, training_cache
from levelhead.lab.claim import Task
from levelhead.lab.plan import Curves, Plan
from levelhead.words import in_bytes


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LEVELHEAD_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "caches")
    assert cache.directory() == Path("caches") / "levelhead"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.directory() == Path.home() / ".cache" / "levelhead"


def test_a_directory_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEVELHEAD_CACHE", "~/kept")
    assert cache.directory("lab", "training") == Path.home() / "kept" / "lab" / "training"


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file.txt"
    cache.write_whole(file, "one √")
    assert file.read_text(encoding="utf-8") == "one √"
    assert not file.stat().st_mode & 0o111 and file.stat().st_mode & 0o600 == 0o600
    with pytest.raises(UnicodeEncodeError):
        cache.write_whole(file, "two \ud800")
    assert file.read_text(encoding="utf-8") == "one √" and os.listdir(tmp_path) == ["file.txt"]


def test_a_link_stays_a_link_and_a_file_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    file, link, dangling = tmp_path / "kept" / "file.txt", tmp_path / "link", tmp_path / "dangling"
    file.write_text("old")
    file.chmod(0o640)
    link.symlink_to(file)
    dangling.symlink_to("kept/new.txt")
    cache.write_whole(link, "one")
    cache.write_whole(dangling, "two")
    assert link.is_symlink() and file.read_text() == "one" and file.stat().st_mode & 0o777 == 0o640
    assert dangling.is_symlink() and (tmp_path / "kept" / "new.txt").read_text() == "two"
    assert sorted(os.listdir(tmp_path / "kept")) == ["file.txt", "new.txt"]


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # or opening it for writing would wait
    try:
        cache.write_whole(pipe, "√")
        assert os.read(reading, 99).decode() == "√" and pipe.is_fifo() and os.listdir(tmp_path) == ["pipe"]
    finally:
        os.close(reading)


def test_a_lock_holds_until_it_is_left(tmp_path: Path) -> None:
    file = tmp_path / "new" / "file.lock"
    with cache.locked(file, wait=True) as ours, cache.locked(file, wait=False) as again:
        assert ours and not again
    with cache.locked(file, wait=False) as ours:
        assert ours


class MicrosoftsLocks(ModuleType):
    """What Windows has in place of fcntl, as far as levelhead uses it."""

    LK_NBLCK = 2

    def locking(self, file: int, mode: int, size: int) -> None:
        assert (mode, size) == (self.LK_NBLCK, 1)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_lock_without_fcntl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, waited = tmp_path / "file.lock", []
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setitem(sys.modules, "msvcrt", MicrosoftsLocks("msvcrt"))
    with ExitStack() as first:
        assert first.enter_context(cache.locked(file, wait=True))
        with cache.locked(file, wait=False) as again:
            assert not again
        monkeypatch.setattr(time, "sleep", lambda seconds: (waited.append(seconds), first.close()))
        with cache.locked(file, wait=True) as ours:
            assert ours and waited == [0.1]


def test_a_cache_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "cache"
    with pytest.raises(LevelheadValueError, match="a cache directory.*Set LEVELHEAD_CACHE"):
        cache.check_writable(folder)
    with pytest.raises(LevelheadValueError, match="a cache directory.*Set LEVELHEAD_CACHE"):
        cache.locked(folder / "x.lock", wait=False).__enter__()


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As in a container that runs with a user id of nobody: no HOME, and no entry in the list of users."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("LEVELHEAD_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    why = (
        "cache: expected a cache directory, got no home directory. "
        "Set LEVELHEAD_CACHE to a directory that can be written to."
    )
    assert main(["cache"]) == 2 and capsys.readouterr().err == f"levelhead: {why}\n"
    found = info()
    assert found.cache == {"directory": None, "bytes": None} and found.off[-1] == why
    assert "  cache  " not in repr(found) and f"off         {why}" in repr(found)


@pytest.mark.parametrize("words", [["cache"], ["cache", "--clear"]])
def test_a_cache_that_cannot_be_read_is_not_an_empty_one(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another user's home for one, as `sudo -u` may leave it. Nothing is forbidden to root, so here it is the name."""
    folder = str(tmp_path / ("x" * 300))
    monkeypatch.setenv("LEVELHEAD_CACHE", folder)
    assert main(words) == 2
    why = capsys.readouterr().err.removeprefix("levelhead: ").removesuffix("\n")
    assert "a cache directory" in why and "Set LEVELHEAD_CACHE" in why
    found = info()
    assert found.cache == {"directory": folder, "bytes": None} and found.off[-1] == why


# ---- sizes and removal


def kept(folder: Path) -> dict[str, int]:
    """Files as levelhead names them; bytes by part of the cache."""
    digits = "0123456789abcdef"
    files = {
        f"gguf/a.b-{2 * digits}-1/model.safetensors": 5,
        "gguf/.making-x_1/config.json": 7,
        f"lab/C7a-{2 * digits}.json": 11,
        f"lab/.C7a-{2 * digits}.json.a_1": 13,
        f"lab/training/copy-{digits + digits[:8]}.json": 17,
        f"lab/training/copy-{digits + digits[:8]}.lock": 0,
    }
    for name, size in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes(size))
    return {"gguf": 12, "lab/training": 17, "lab": 24}


def test_the_cache_is_measured_and_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEVELHEAD_CACHE", str(tmp_path / "cache"))
    assert cache.sizes() == {}
    sizes = kept(tmp_path / "cache")
    assert cache.sizes() == sizes
    assert info().cache == {"directory": str(tmp_path / "cache"), "bytes": sum(sizes.values())}
    cache.clear()
    assert cache.sizes() == {} and os.listdir(tmp_path) == []


def test_directories_that_were_not_filled_go_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run without a verdict leaves."""
    monkeypatch.setenv("LEVELHEAD_CACHE", str(tmp_path / "cache"))
    cache.check_writable(training_cache.directory())
    assert main(["cache", "--clear"]) == 0 and os.listdir(tmp_path) == []


def test_clearing_leaves_what_levelhead_did_not_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LEVELHEAD_CACHE may be any directory, a home for one."""
    monkeypatch.setenv("LEVELHEAD_CACHE", str(tmp_path / "home"))
    kept(tmp_path / "home")
    (tmp_path / "elsewhere").mkdir()
    ours = ["elsewhere/file", "home/thesis.txt", "home/lab/C7.json", "home/lab/training/notes.json", "home/gguf/x.gguf"]
    for name in ours:
        (tmp_path / name).write_text("mine")
    (tmp_path / "home" / "gguf" / f"linked-{'0' * 32}-1").symlink_to(tmp_path / "elsewhere")
    cache.clear()
    assert cache.sizes() == {}
    assert sorted(str(x.relative_to(tmp_path)) for x in tmp_path.rglob("*") if x.is_file()) == sorted(ours)


def test_what_is_kept_has_the_names_that_are_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and trainings as the lab writes them; tests/front/test_models.py has GGUF files."""
    monkeypatch.setenv("LEVELHEAD_CACHE", str(tmp_path / "cache"))
    task = Task(registry.claim("C7a"), {}, 0)
    cache.check_writable(result_cache.directory())
    result_cache.save(task, {"verdict": "confirmed"})
    plan = Plan("retrieval", 64, "1/sqrt(d_k)", 8, 2, seed=3, steps=4, every=2, rate=1e-3)
    with cache.locked(training_cache._place(plan).with_suffix(".lock"), wait=True):
        training_cache._keep(plan, Curves([], [], [], {}, {}, [], [], []))
    assert cache.sizes().keys() == {"lab/training", "lab"}
    assert len(list((tmp_path / "cache").rglob("*.*"))) == 3
    cache.clear()
    assert os.listdir(tmp_path) == []


def test_a_training_that_cannot_be_kept_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("LEVELHEAD_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "write_whole", full)
    plan = Plan("retrieval", 64, "1/sqrt(d_k)", 8, 2, seed=3, steps=4, every=2, rate=1e-3)
    with pytest.warns(UserWarning, match="retrieval will be trained again next time: .*No space left"):
        training_cache._keep(plan, Curves([], [], [], {}, {}, [], [], []))


def test_the_command_says_what_is_kept_and_clears_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LEVELHEAD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    kept(tmp_path / "cache")
    for words, first in ((["cache"], "kept in"), (["cache", "--clear"], "removed from")):
        assert main(words) == 0
        assert capsys.readouterr().out.splitlines()[:4] == [
            f"{first} {tmp_path / 'cache'}:",
            "  gguf          12 B  models of GGUF files, de-quantised",
            "  lab/training  17 B  trainings of the lab",
            "  lab           24 B  results of claims",
        ]
    assert main(["cache"]) == 0 and os.listdir(tmp_path) == []
    assert capsys.readouterr().out == f"nothing is kept in {tmp_path / 'cache'}\n"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1499, "1.5 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (541_234_567, "541 MB"),
    ],
)
def test_bytes_in_words(size: int, text: str) -> None:
    assert in_bytes(size) == text
