"""`levelhead cards`: the list, all cards, the file for Anki, and the dialogue on a terminal."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from pathlib import Path

import pytest

from levelhead.cli import main
from levelhead.cli.cards import SOON
from levelhead.course import deck
from levelhead.course.cards import CARDS
from levelhead.course.catalogue import catalogues

Answer = str | type[BaseException]
Says = Callable[..., list[Answer]]


@pytest.fixture
def dialogue(monkeypatch: pytest.MonkeyPatch) -> Says:
    """A terminal whose reader types these answers; an exception among them is raised. Returns what is not yet typed."""

    def begin(*answers: Answer) -> list[Answer]:
        left = list(answers)

        def ask() -> str:
            answer = left.pop(0)
            if isinstance(answer, str):
                return answer
            raise answer

        for stream in ("stdin", "stdout"):
            monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
        monkeypatch.setattr(builtins, "input", ask)
        return left

    return begin


def fronts(chapter: str, language: str = "en") -> list[str]:
    return [deck.plain(one.front, one.numbers) for one in deck.deck(language, chapter)]


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed, without line ends and styles."""
    out = capsys.readouterr().out
    return " ".join(out.replace("\x1b[1m", "").replace("\x1b[0m", "").split())


def test_without_a_terminal_all_cards_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cards"]) == 0
    printed = said(capsys)
    for one in deck.deck():
        assert deck.plain(one.front, one.numbers) in printed and deck.plain(one.back, one.numbers) in printed
    assert "Rests on: C7a (confirmed)" in printed and "Numbers from: C7a, 20" in printed


def test_a_chapter_in_another_language(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cards", "--chapter", "softmax", "--language", "hi-Latn", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:18].strip() for line in lines] == [card.id for card in CARDS if card.chapter == "softmax"]
    assert [line[19:] for line in lines] == fronts("softmax", "hi-Latn")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--chapter", "soft"], "--chapter: expected one of hook, by_hand, softmax"),
        (["--language", "../en"], "--language: expected one of en, hi-Latn, got '../en'"),
        (["--anki", ""], "--anki: expected a file, got an empty name"),
        (["--anki", "/no/such/folder/cards.txt"], "--anki: expected a file"),
    ],
)
def test_bad_input_is_2_and_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str) -> None:
    assert main(["cards", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and reason in captured.err and captured.err.count("\n") == 1


def test_the_file_for_anki(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "cards.txt"
    assert main(["cards", "--anki", str(file)]) == 0
    assert capsys.readouterr().out == f"{len(CARDS)} cards\nwrote {file}\n"
    assert file.read_text(encoding="utf-8") == deck.anki("en", deck.deck())
    assert main(["cards", "--anki", "-", "--chapter", "hook"]) == 0
    assert capsys.readouterr().out == deck.anki("en", deck.deck(chapter="hook"))


def test_what_was_missed_comes_again(dialogue: Says, capsys: pytest.CaptureFixture[str]) -> None:
    questions = fronts("softmax")
    assert len(questions) > SOON + 1
    answers = ["", "n", *["", "maybe", "y"], *["", "Y"] * (len(questions) - 1)]
    left = dialogue(*answers)
    assert main(["cards", "--chapter", "softmax"]) == 0
    printed = said(capsys)
    assert not left and printed.endswith("These were all cards.")
    assert printed.count("[Enter shows the answer, q ends]") == len(questions) + 1
    places = [printed.index(question) for question in questions]
    again = printed.index(questions[0], places[0] + 1)
    assert places[SOON] < again < places[SOON + 1]  # after three others, before the rest


@pytest.mark.parametrize(("language", "no", "yes"), [("en", "no", "Yes"), ("hi-Latn", "nahin", "haan")])
def test_answers_are_words_of_the_language_and_lines_fit(
    dialogue: Says,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    language: str,
    no: str,
    yes: str,
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    count = len(fronts("hook", language))
    left = dialogue("", "nothing", "yellow", no, *["", yes] * count)
    assert main(["cards", "--chapter", "hook", "--language", language]) == 0
    lines = capsys.readouterr().out.replace("\x1b[1m", "").replace("\x1b[0m", "").splitlines()
    assert not left
    assert [line for line in lines if len(line) > 40 and "[" not in line and " " in line.strip()] == []


def test_help_names_the_languages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["cards", "--help"])
    assert " or ".join(catalogues()) in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("leaves", ["q", KeyboardInterrupt, EOFError])
@pytest.mark.parametrize("turned", [False, True])
def test_a_reader_can_leave_at_any_time(
    dialogue: Says, capsys: pytest.CaptureFixture[str], leaves: str | type[BaseException], turned: bool
) -> None:
    dialogue(*([""] if turned else []), leaves)
    assert main(["cards"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "" and fronts("hook")[0] in " ".join(captured.out.split()).replace("\x1b[1m", "").replace(
        "\x1b[0m", ""
    )
    assert fronts("hook")[1] not in captured.out
