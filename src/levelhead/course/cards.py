"""The cards: questions as an interviewer or an examiner asks them, each from a claim or a step of a chapter.

The catalogues hold their words, under `cards.deck`. `card_numbers.py` has their numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from levelhead.course.card_numbers import numbers
from levelhead.course.numbers import Number

_DECLARED = """
hook
  two-heads C5 C6
  same-order C5
  most-gradient C6
by_hand
  formula
  shapes
  count
  width-of-v C1a
softmax
  gap C4
  shift C4
  no-share C4
  large-gap C4
  divide-gap C4
walk
  variance C1
  why-d_k C1
  mean-zero C1
  not-normal C1
  two-and-three C2
  any-variance C3
root
  root-not-d_k C3 C9 C11
  too-flat C9
  not-root-d C10
  first-transformer C3
  gpt-three C10
  every-width C11
saturation
  slope C6
  gap-of-six C6
  jacobian C6
  what-passes C5 C11
  largest-weight C5 C11
  norm-rises C5 C7a C11
training
  step-zero C7a
  why-larger C7 C7a
  why-less C7
  stand-still C7
  how-much-slower C12
  values-learn C7a
  generalise C16
overflow
  no-overflow C8 C8a
  limits C8
  naive C8
  score-overflows C8a
  no-explosion C8
rivals
  additive C13
  additive-time C13
  additive-bound C13a
  cosine
  random-cosine
attack
  correlated C9a
  mup C9a
  qk-norm
  softcap
online
  rescale
  exact
  memory
  long C14
real
  sharp C11a
  subspaces C15
"""


@dataclass(frozen=True)
class Card:
    """`id` never changes: readers' browsers and Anki know the card by it."""

    id: str
    chapter: str
    claims: tuple[str, ...]

    def numbers(self) -> Mapping[str, Number]:
        """All that its chapter has; its words use some of them."""
        return numbers(self.chapter)


def _cards() -> tuple[Card, ...]:
    found, chapter = [], ""
    for line in _DECLARED.strip().splitlines():
        name, *claims = line.split()
        if line.startswith(" "):
            found.append(Card(name, chapter, tuple(claims)))
        else:
            chapter = name
    return tuple(found)


CARDS = _cards()  # in the order of the story
