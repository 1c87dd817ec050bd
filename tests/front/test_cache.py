"""The cache: where it is, files written whole, locks, and the error where it cannot be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from levelhead import cache
from levelhead.errors import LevelheadValueError


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


def test_a_cache_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "cache"
    with pytest.raises(LevelheadValueError, match="a cache directory.*Set LEVELHEAD_CACHE"):
        cache.check_writable(folder)
    with pytest.raises(LevelheadValueError, match="a cache directory.*Set LEVELHEAD_CACHE"):
        cache.locked(folder / "x.lock", wait=False).__enter__()
