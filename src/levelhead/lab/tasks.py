"""The tasks of the lab's small transformer: to look a value up, and to continue a text.

A task is four NumPy arrays, made from a seed: sequences to learn from, sequences that are held out, and the answers to
both. The number of sequences to learn from is part of a task: few are repeated often, and can be memorised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from levelhead.errors import bad_value

Ints: TypeAlias = NDArray[np.int64]

NO_ANSWER = -100  # where nothing is asked; PyTorch's cross entropy leaves it out by default

# Retrieval: so many pairs of a key and a value, then the keys again, in another order.
PAIRS, KEYS, VALUES = 16, 64, 32
BLANK = VALUES  # stands for the value that is asked for

# Text: windows of bytes.
WINDOW = 64

HELD_OUT = 64  # sequences
# To learn from: so many that a short training repeats each a few times, and so few that it repeats each dozens of
# times. With half of `FEW`, even 1/√d_k memorises retrieval.
PLENTY: Mapping[str, int] = MappingProxyType({"retrieval": 1024, "text": 2048})
FEW: Mapping[str, int] = MappingProxyType({"retrieval": 64, "text": 256})


@dataclass(frozen=True)
class Examples:
    """N sequences of T tokens. A token is C numbers, whose embeddings a model adds up."""

    tokens: Ints  # (N, T, C)
    answers: Ints  # (N, T); NO_ANSWER where nothing is asked


@dataclass(frozen=True)
class Task:
    name: str
    vocabulary: tuple[int, ...]  # how many numbers there are, for each of the C
    classes: int  # of answers
    learnt: Examples
    held_out: Examples


def make(name: str, seed: int, examples: int) -> Task:
    """A task by name, with so many sequences to learn from.

    >>> make("retrieval", 0, 64).learnt.tokens.shape
    (64, 32, 2)
    """
    if name not in TASKS:
        raise bad_value("task", f"one of {', '.join(TASKS)}", repr(name), "Check the spelling")
    return TASKS[name](np.random.default_rng(seed), examples)


def retrieval(chance: np.random.Generator, examples: int) -> Task:
    """Pairs (key, value), then questions (key, blank): the answer is the value that came with it.

    Keys and values are drawn anew in every sequence, so that nothing but looking back answers a question, and a single
    head can do it.
    """
    held_out, learnt = (_looked_up(n, chance) for n in (HELD_OUT, examples))
    return Task("retrieval", (KEYS, VALUES + 1), VALUES, learnt, held_out)


def _looked_up(n: int, chance: np.random.Generator) -> Examples:
    keys = chance.random((n, KEYS)).argsort(1)[:, :PAIRS]
    values = chance.integers(VALUES, size=(n, PAIRS))
    order = chance.random((n, PAIRS)).argsort(1)
    pairs = np.stack([keys, values], -1)
    asked = np.stack([np.take_along_axis(keys, order, 1), np.full_like(keys, BLANK)], -1)
    answers = np.take_along_axis(values, order, 1)
    unasked = np.full_like(answers, NO_ANSWER)
    return Examples(np.concatenate([pairs, asked], 1), np.concatenate([unasked, answers], 1))


def text(_: np.random.Generator, examples: int) -> Task:
    """The next byte of Python's own help texts, which every Python contains; they differ a little between versions.

    The windows that are held out are a stretch of their own, at the end.
    """
    from pydoc_data.topics import topics

    whole = np.frombuffer("\n".join(topics.values()).encode(), np.uint8).astype(np.int64)
    kept = len(whole) - (HELD_OUT * WINDOW + 1)
    if examples * WINDOW + 1 > kept:
        wanted = f"at most {(kept - 1) // WINDOW} windows of {WINDOW} bytes"
        raise bad_value("examples", wanted, examples, "Choose fewer")
    learnt, held_out = _windows(whole[: examples * WINDOW + 1]), _windows(whole[kept:])
    return Task("text", (256, WINDOW), 256, learnt, held_out)


def _windows(stretch: Ints) -> Examples:
    """Byte and place of each token; the answer is the byte that follows."""
    letters, following = (x.reshape(-1, WINDOW) for x in (stretch[:-1], stretch[1:]))
    places = np.broadcast_to(np.arange(WINDOW), letters.shape)
    return Examples(np.stack([letters, places], -1), following)


TASKS: Mapping[str, Callable[[np.random.Generator, int], Task]] = {"retrieval": retrieval, "text": text}
