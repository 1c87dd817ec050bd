"""What a chapter of the course is, without its words: its question, its claims, its numbers, the data of its scene."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from levelhead.course.numbers import Number


@dataclass(frozen=True)
class Chapter:
    """`answer` is one of `options`; the catalogues hold their words. `numbers` has every number that the words show.
    `data` is JSON for the scene; `steps` is how many steps its player has, 0 without one."""

    id: str
    options: tuple[str, ...]
    answer: str
    claims: tuple[str, ...]
    numbers: Callable[[], Mapping[str, Number]]
    data: Callable[[], Any]
    steps: int = 0

    def __post_init__(self) -> None:
        if self.answer not in self.options:
            raise ValueError(f"{self.id}: the answer {self.answer!r} is none of {self.options}")
