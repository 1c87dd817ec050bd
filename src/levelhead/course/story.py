"""A chapter as JSON for the page, without words: question, numbers, data, claims with verdicts, code samples."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from levelhead.course.chapter import Chapter
from levelhead.course.results import claim
from levelhead.json_numbers import json_value

SAMPLES = Path(__file__).with_name("samples")
LIBRARIES = ("numpy", "torch")
_DIGITS = 4  # of numbers that are drawn


def chapter_json(chapter: Chapter) -> dict[str, Any]:
    return {
        "id": chapter.id,
        "options": list(chapter.options),
        "answer": chapter.answer,
        "steps": chapter.steps,
        "claims": [{"id": id, "verdict": claim(id)["verdict"]} for id in chapter.claims],
        "numbers": {name: json_value(asdict(number)) for name, number in chapter.numbers().items()},
        "data": json_value(chapter.data(), digits=_DIGITS),
        "samples": {library: sample(chapter.id, library) for library in LIBRARIES},
    }


def sample(chapter: str, library: str) -> str:
    """The code that a reader can run: it prints `name value` lines, with names of the chapter's numbers."""
    return (SAMPLES / f"{chapter}_{library}.py").read_text(encoding="utf-8")
