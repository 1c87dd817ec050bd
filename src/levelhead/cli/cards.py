"""`levelhead cards`: its arguments, the dialogue on a terminal, the list, the file for Anki.

On a terminal a card that was missed comes again after a few others. Ctrl-C, Ctrl-D and q end it, with exit code 0.
Without a terminal all cards are printed, question and answer.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from levelhead.cli.command import Commands, add_command, requested_files, written
from levelhead.course.languages import PATTERN, languages
from levelhead.terminal import colour_wanted, columns, paint

if TYPE_CHECKING:
    from levelhead.course.deck import Written

SOON = 3  # other cards before one that was missed comes again; so has the page
_WIDEST = 100  # columns that are good to read
_YES, _NO = ("y", "yes"), ("n", "no")  # in every language; each has its own beside them
_ABOUT = """questions on √d_k, as interviewers ask them, with measured answers

Shows a question; Enter shows the answer. What you missed comes again. Without a terminal it prints all cards.

examples:
  levelhead cards
  levelhead cards --chapter softmax --language hi-Latn
  levelhead cards --list
  levelhead cards --anki cards.txt
exit code: 0 also after Ctrl-C, 2 bad input
"""


def add(commands: Commands) -> None:
    parser = add_command(commands, "cards", run, _ABOUT)
    parser.add_argument(
        "--language", default=PATTERN, metavar="L", help=f"{' or '.join(languages())}; default: {PATTERN}"
    )
    parser.add_argument("--chapter", metavar="NAME", help="only this chapter's; default: all")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--list", action="store_true", help="print the questions alone")
    instead.add_argument("--anki", metavar="FILE", help="write them there for Anki (File, Import); - is stdout")


def run(arguments: argparse.Namespace) -> Iterator[str]:
    """Yields what to print; on a terminal it asks between."""
    from levelhead.course import deck
    from levelhead.course.catalogue import catalogues

    files = requested_files(arguments, ["anki"])
    cards = deck.deck(arguments.language, arguments.chapter)
    words = catalogues()[arguments.language]
    if files:
        yield from written(files, {"anki": deck.anki(arguments.language, cards)}, [f"{len(cards)} cards"])
    elif arguments.list:
        yield from (f"{one.card.id:<18} {deck.plain(one.front, one.numbers)}" for one in cards)
    elif sys.stdin.isatty() and sys.stdout.isatty():
        yield from _asked(cards, words)
    else:
        for one in cards:
            yield f"{_front(one)}\n{_back(one, words)}\n"


def _asked(cards: Sequence[Written], words: Mapping[str, Any]) -> Iterator[str]:
    """The dialogue, until no card is left or the reader leaves."""
    say, queue = words["cards"]["words"], list(cards)
    try:
        while queue:
            one = queue.pop(0)
            yield f"\n{_front(one)}"
            if _answer(say["terminal_turn"]) == "q":
                return
            yield _back(one, words)
            knew, (yes, no) = "", (say[name].split() for name in ("terminal_yes", "terminal_no"))
            while knew not in (*_YES, *yes, *_NO, *no, "q"):
                knew = _answer(say["terminal_knew"])
            if knew == "q":
                return
            if knew in (*_NO, *no):
                queue.insert(SOON, one)
    except (KeyboardInterrupt, EOFError):
        yield ""  # the next prompt of the shell has its own line
        return
    yield say["terminal_end"]


def _answer(prompt: str) -> str:
    print(f"  [{prompt}] ", end="", flush=True)  # input's own prompt goes to stderr on some systems
    return input().strip().lower()


def _front(one: Written) -> str:
    from levelhead.course.deck import plain

    return paint(_wrapped(plain(one.front, one.numbers), ""), "bold", colour_wanted(sys.stdout))


def _back(one: Written, words: Mapping[str, Any]) -> str:
    from levelhead.course.deck import plain, sources

    lines = [_wrapped(plain(one.back, one.numbers)), *(_wrapped(line) for line in sources(one, words))]
    return "\n".join(lines)


def _wrapped(text: str, indent: str = "  ") -> str:
    width = min(columns(), _WIDEST)
    return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False)
