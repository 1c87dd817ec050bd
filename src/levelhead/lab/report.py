"""Claims and results as text for people: theory beside what was measured, a line for each number.

Programs get `Result.json()`. Nothing is computed here.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from levelhead.lab.claim import Claim
from levelhead.lab.result import Result

__all__ = ["claim_lines", "listing", "result_lines", "summary"]

_WIDTH = 100
_COLOURS = {"confirmed": 32, "caveat": 33, "refuted": 31, "undecided": 90}
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
    verdict = f"{result.verdict:<10}"
    if colour:
        verdict = f"\x1b[{_COLOURS[result.verdict]}m{verdict}\x1b[0m"
    wanted = "as expected" if result.as_expected else f"EXPECTED {result.expected.upper()}"
    if result.verdict == "undecided":
        wanted = f"expected {result.expected}"
    yield f"{result.id:<5}{verdict} {wanted}"
    yield _indented(result.claim, " " * 5)
    yield from _table(result)
    yield ""


def summary(results: Sequence[Result]) -> str:
    """One line for all of them."""
    wrong = [result.id for result in results if not result.as_expected]
    undecided = [result.id for result in results if result.verdict == "undecided"]
    said = f"{len(results)} claim{'s' * (len(results) != 1)}: "
    said += f"not as expected: {', '.join(wrong)}" if wrong else "no verdict against expectation"
    return said + (f"; undecided: {', '.join(undecided)}" if undecided else "")


# ---- numbers ----------------------------------------------------------------


def _table(result: Result) -> Iterator[str]:
    rows = [
        (name, _told(_at(result.theory, path)), _measured(value, _at(result.stderr, path)))
        for path, name, value in _leaves(result.measured)
    ]
    wide = [min(max(len(row[part]) for row in rows), 34) for part in (0, 1)]
    if any(theory for _, theory, _ in rows):
        yield " " * 5 + f"{'':<{wide[0]}}  {'theory':<{wide[1]}}  measured"
    for name, theory, measured in rows:
        yield f"{'':5}{name:<{wide[0]}}  {theory:<{wide[1]}}  {measured}".rstrip()


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """Whatever is no mapping, with its way down from the root and a name for it."""
    if not isinstance(value, Mapping):
        yield path, ", ".join(path) or "value", value
        return
    for name, part in value.items():
        yield from _leaves(part, (*path, name))


def _at(value: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _measured(value: Any, stderr: Any) -> str:
    if isinstance(value, list):
        errors = stderr if isinstance(stderr, list) else [None] * len(value)
        parts = [_measured(*pair) for pair in zip(value, errors, strict=False)]
        return _short(parts)
    return _told(value) + ("" if stderr is None else f" ± {stderr:.1g}")


def _told(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return _short([_told(part) for part in value])
    if isinstance(value, float):
        return f"{value:.6g}" if value == round(value) else f"{value:.4g}"
    return str(value)


def _short(parts: list[str]) -> str:
    shown = parts if len(parts) <= _SHOWN else [*parts[: _SHOWN - 2], "…", parts[-1]]
    return f"[{', '.join(shown)}]"


def _indented(text: str, first: str) -> str:
    return textwrap.fill(
        text, _WIDTH, initial_indent=first, subsequent_indent=" " * len(first)
    )  # long words, such as lists, are cut rather than wrapped by the terminal
