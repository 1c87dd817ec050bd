"""Claims and results as text: theory beside what was measured, a line for each number. Programs use `Result.json()`."""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from levelhead.lab.claim import Claim, Path
from levelhead.lab.claim_figure import at, leaves
from levelhead.lab.result import Result
from levelhead.terminal import Bar, paint
from levelhead.words import aligned, plural

_WIDTH = 100
_PAUSE = 0.05  # seconds between two drawings of the progress; experiments report far more often
_SHOWN = 6  # numbers of a list; the others are in the JSON


def listing(claims: Sequence[Claim]) -> Iterator[str]:
    """A line for each claim: id, expected verdict, sentence."""
    for claim in claims:
        yield _indented(claim.claim, f"{claim.id:<5}{claim.expected:<11}")


def claim_lines(claim: Claim) -> Iterator[str]:
    """Everything about a claim that is known before it is measured."""
    yield _indented(claim.claim, f"{claim.id:<5}")
    yield f"\n{claim.derivation}\n"
    yield _indented(claim.criterion, "criterion  ")
    yield f"expected   {claim.expected}"
    for name, params in (("quick", claim.quick), ("full", {**claim.quick, **claim.full})):
        yield _indented(", ".join(f"{key}={value}" for key, value in params.items()), f"{name:<11}")
    if claim.alone:
        yield "           measures time: runs last, with nothing beside it"


def result_lines(result: Result, *, colour: bool) -> Iterator[str]:
    """The verdict, the claim, and its numbers."""
    comparison = "as expected" if result.as_expected else f"EXPECTED {result.expected.upper()}"
    if result.verdict == "undecided":
        comparison = f"expected {result.expected}"
    yield f"{result.id:<5}{paint(f'{result.verdict:<10}', result.verdict, colour)} {comparison}"
    yield _indented(result.claim, " " * 5)
    yield from _table(result)
    yield ""


def summary(results: Sequence[Result]) -> str:
    """One line for all of them."""
    wrong = [result.id for result in results if not result.as_expected]
    undecided = [result.id for result in results if result.verdict == "undecided"]
    words = f"{plural(len(results), 'claim')}: "
    words += f"not as expected: {', '.join(wrong)}" if wrong else "no verdict against expectation"
    return words + (f"; undecided: {', '.join(undecided)}" if undecided else "")


class Progress(Bar):
    """Progress by claim."""

    def __init__(self, ids: Sequence[str], stream: TextIO | None = None) -> None:
        super().__init__(len(ids), stream)
        self._shares = dict.fromkeys(ids, 0.0)
        self._drawn = 0.0

    def tell(self, id: str, share: float, words: str) -> None:
        """Shows which share of a claim is measured."""
        self._shares[id] = min(max(share, 0.0), 1.0)
        now = time.monotonic()
        if now - self._drawn > _PAUSE:
            self._drawn = now
            self.draw(sum(self._shares.values()), f"{id}: {words}")

    def add(self, id: str, verdict: str) -> None:
        """Counts a claim that has its verdict."""
        self._shares[id] = 1.0
        self.finished += 1
        self.log(f"{id} {verdict}", self.finished)


# ---- numbers ----------------------------------------------------------------


def _table(result: Result) -> Iterator[str]:
    theory, measured = result.theory, result.measured
    if isinstance(theory, str) and isinstance(measured, Mapping):  # one sentence about all of them
        yield _indented(theory, f"{'':5}theory: ")
        theory = {}
    paths = dict.fromkeys(path for path, _ in (*leaves(measured), *leaves({} if theory is None else theory)))
    rows = []
    for path in paths:
        number = _measured(_at(measured, path), _at(result.stderr, path))
        rows.append((", ".join(path), _text(_at(theory, path)), number))
    titles = [("", "theory", "measured")] * any(theory for _, theory, _ in rows)
    yield from (f"{'':5}{line}".rstrip() for line in aligned([*titles, *rows], left=range(3)))


def _at(value: Any, path: Path) -> Any:
    """The value at the end of the path; None if there is none, or more than one."""
    value = at(value, path)
    return None if isinstance(value, Mapping) else value


def _measured(value: Any, stderr: Any) -> str:
    if isinstance(value, list):
        errors = stderr if isinstance(stderr, list) else [None] * len(value)
        return _short([_measured(*pair) for pair in zip(value, errors, strict=False)])
    if not (isinstance(value, float) and isinstance(stderr, float) and stderr > 0):
        return _text(value)
    digits = 1 - math.floor(math.log10(stderr))  # two of the error's, and no more of the value's
    if not 0 <= digits <= 6:
        return f"{_text(value)} ± {stderr:.2g}"
    return f"{value:.{digits}f} ± {stderr:.{digits}f}"


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return _short([_text(part) for part in value])
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


def _short(parts: list[str]) -> str:
    shown = parts if len(parts) <= _SHOWN else [*parts[: _SHOWN - 2], "…", parts[-1]]
    return f"[{', '.join(shown)}]"


def _indented(text: str, first: str) -> str:
    # Long words, such as lists, are cut rather than wrapped by the terminal.
    return textwrap.fill(text, _WIDTH, initial_indent=first, subsequent_indent=" " * len(first))
