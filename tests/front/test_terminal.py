"""Colour, width, messages and progress: on a terminal, and where there is none."""

from __future__ import annotations

import io

import pytest

from levelhead import terminal
from levelhead.bench.progress import Progress as BenchProgress
from levelhead.lab.report import Progress as LabProgress

CLEAR = "\r\x1b[2K"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("value", "colour"), [(None, True), ("", True), ("1", False)])
def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch, value: str | None, colour: bool) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    if value is not None:
        monkeypatch.setenv("NO_COLOR", value)
    assert terminal.colour_wanted(Terminal()) is colour
    assert not terminal.colour_wanted(io.StringIO())


def test_a_dumb_terminal_gets_no_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "dumb")
    screen = Terminal()
    assert not terminal.colour_wanted(screen)
    bar = terminal.Bar(2, screen)
    bar.draw(1, "half")
    bar.log("one", 1)
    assert screen.getvalue() == "  0:00 1/2 one\n"


def test_paint_is_nothing_without_colour() -> None:
    assert terminal.paint("so", "error", False) == "so"
    assert terminal.paint("so", "error", True) == "\x1b[31mso\x1b[0m"


@pytest.mark.parametrize(("columns", "requested", "width"), [(132, None, 132), (40, None, 80), (132, 90, 90)])
def test_width(monkeypatch: pytest.MonkeyPatch, columns: int, requested: int | None, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert terminal.width_of(requested) == width


def test_messages_are_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.message("so it is")
    assert capsys.readouterr() == ("", "levelhead: so it is\n")


def test_a_status_line_never_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    line = terminal.StatusLine(stream := Terminal())
    line.show("twelve chars")
    line.clear()
    assert stream.getvalue() == f"{CLEAR}twelve cha{CLEAR}"


def test_a_status_line_is_nothing_elsewhere() -> None:
    line = terminal.StatusLine(stream := io.StringIO())
    line.show("words")
    line.clear()
    assert stream.getvalue() == ""


def test_the_lab_has_a_bar_on_a_terminal() -> None:
    progress = LabProgress(["C1", "C2"], stream := Terminal())
    progress.tell("C1", 0.5, "halfway")
    assert stream.getvalue() == CLEAR + "█" * 6 + "░" * 18 + " 0/2 C1: halfway"
    progress.add("C1", "confirmed")
    progress.clear()
    assert stream.getvalue().endswith(CLEAR)


def test_the_lab_has_a_line_per_claim_elsewhere() -> None:
    progress = LabProgress(["C1", "C2"], stream := io.StringIO())
    progress.tell("C1", 0.5, "halfway")
    progress.add("C1", "confirmed")
    progress.clear()
    assert stream.getvalue() == "  0:00 1/2 C1 confirmed\n"


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_the_benchmark_counts_cells(stream: io.StringIO) -> None:
    progress = BenchProgress(2, stream)
    for cell, doing in (("limits", "peak"), ("a", "x"), ("a", "y"), ("b", "x")):
        progress.tell(cell, doing)
    progress.clear()
    if stream.isatty():
        drawn = [line.split(" ", 1)[1] for line in stream.getvalue().split(CLEAR)[1:-1]]
        assert drawn == ["0/2 limits: peak", "0/2 a: x", "0/2 a: y", "1/2 b: x"]
    else:
        lines = stream.getvalue().splitlines()
        assert [line.split()[1:] for line in lines] == [["limits"], ["1/2", "a"], ["2/2", "b"]]
