"""No number of the course is typed: recorded ones follow their records, the others are computed."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from levelhead import course
from levelhead.course.cards import CARDS
from levelhead.course.chapters import CHAPTERS
from levelhead.course.numbers import CHOSEN, shown
from levelhead.lab import recorded

ALL = (*CHAPTERS, *CARDS)
MAKERS = {"live": 0, "recorded": 0, "theory": 0, "claim_number": 1}  # and where each has its value


def test_no_number_is_typed_unless_somebody_chose_it() -> None:
    found = 0
    for path in Path(course.__file__).parent.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in MAKERS:
                at = MAKERS[call.func.id]
                value, where = call.args[at], call.args[1 - at]
                chosen = isinstance(where, ast.Constant) and where.value == CHOSEN
                computed = any(isinstance(part, ast.Name) for part in ast.walk(value))
                assert chosen or computed, f"{path.name}: {ast.unparse(call)}"
                found += 1
    assert found > 100


def test_one_recorded_number_is_rounded_once() -> None:
    """The same measurement of the same claim is not 0.99 in one chapter and 0.985 in another."""
    texts: dict[tuple[str, float], set[str]] = {}
    for one in ALL:
        for number in one.numbers().values():
            if number.source == "recorded":
                texts.setdefault((number.where.split(",")[0], number.value), set()).add(number.text)
    assert len(texts) > 50
    assert {place: found for place, found in texts.items() if len(found) > 1} == {}


@pytest.fixture
def other_records(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every number of every record that is not whole differs by a percent or two, settings among them.

    How much depends on the value, so equal numbers stay equal: a learning rate still says which training runs belong
    together. Different numbers change by different factors, so ratios change too.
    """
    real = recorded.load

    def changed(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: changed(one) for name, one in value.items()}
        if isinstance(value, list):
            return [changed(one) for one in value]
        if isinstance(value, float) and not value.is_integer():
            return value * (1.01 + 1e-5 * (hash(value) % 1009))  # the hash of a float is the same in every process
        return value

    forget()
    monkeypatch.setattr(recorded, "load", lambda name: changed(real(name)))
    yield
    monkeypatch.undo()
    forget()


def forget() -> None:
    """Empties the caches of the course."""
    for name, module in list(sys.modules.items()):
        if name.startswith(course.__name__):
            for value in list(vars(module).values()):
                if clear := getattr(value, "cache_clear", None):
                    clear()


def test_the_text_follows_the_records(request: pytest.FixtureRequest) -> None:
    before = {one.id: dict(one.numbers()) for one in ALL}
    request.getfixturevalue("other_records")
    followed = 0
    for one in ALL:
        now = one.numbers()
        for name, number in before[one.id].items():
            if number.source == "recorded" and not float(number.value).is_integer():
                assert now[name].value != number.value, (one.id, name)
                assert now[name].text in {shown(now[name].value, digits) for digits in range(1, 8)}, (one.id, name)
                followed += 1
    assert followed > 100
