"""The chapter on training is light: before "More" one idea at a time, and few numbers."""

from __future__ import annotations

import json

import pytest

from levelhead.course.catalogue import catalogues, placeholders
from levelhead.course.chapters import training

MAIN = ("intro", "question", "options", "because", "text", "steps", "takeaway")
DRAWN = ("push", "undivided", "divided", "shades")  # words of the scene; the others are those of the table in "More"
MOST = 3


@pytest.mark.parametrize("language", list(catalogues()))
def test_three_numbers_and_one_optimiser_come_before_more(language: str) -> None:
    own = catalogues()[language][training.CHAPTER.id]
    before = json.dumps([*(own[name] for name in MAIN), *(own["words"][name] for name in DRAWN)])
    assert placeholders(before) == ["first", "reached", "steps_drawn"] and len(placeholders(before)) <= MOST
    assert "Adam" in before and "SGD" not in before
    assert "SGD" in json.dumps(own["more"])


def test_every_number_that_left_the_main_line_is_behind_more() -> None:
    own = catalogues()["en"][training.CHAPTER.id]
    told = set(placeholders(json.dumps(own["more"]))) | set(training.RATIOS)
    drawn = {"first_narrow", "first_wide"}  # in the text alternative of the first picture
    assert training.CHAPTER.numbers().keys() - drawn - {"missed"} <= told | {"first"}
    assert "{missed}" in own["claims"]["C12"]
