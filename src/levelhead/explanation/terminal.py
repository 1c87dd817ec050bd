"""A head's story in a terminal: the block, the steps with their numbers, scaled beside unscaled.

Keeps to the width it is given, 80 columns at least; what does not fit is cut and the cut is said.
Colour only repeats what the numbers say.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator

import numpy as np

from levelhead.explanation import terminal_block, terminal_table
from levelhead.explanation.head_report import HeadReport
from levelhead.explanation.head_steps import NUMBERED, Array, Gauge, Step, in_brackets
from levelhead.explanation.token_attention import TokenAttention
from levelhead.explanation.tokens import quoted
from levelhead.show.text import paint

__all__ = ["lines", "steps"]

NARROW = 80  # below this nothing is promised
_ROWS = 24  # rows of a table that are shown
_HEADS = 12  # lines of the table of heads
_BARS = 16  # keys in the list of bars
_OUTPUT = 6  # columns of the output
_DIGITS = {"scores": range(4), "weights": range(2, 5)}  # after the point, as room allows


def lines(story: HeadReport, *, colour: bool = False, width: int | None = None) -> Iterator[str]:
    """All of it."""
    wide = max(NARROW, shutil.get_terminal_size((100, 24)).columns if width is None else width)
    yield from (paint(line, "bold", colour) for line in _wrapped(story.title, wide))
    yield from _wrapped(story.about, wide)
    for note in story.notes:
        yield from _wrapped(f"· {note}", wide, hang="  ")
    yield ""
    yield from terminal_block.lines(story.head)
    yield ""
    yield from steps(story, colour=colour, width=wide)
    yield ""
    yield from _beside(story, colour, wide)
    if story.attended is not None:
        yield ""
        yield from _heads(story.attended, colour, wide)


def _wrapped(text: str, width: int, hang: str = "") -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=hang, break_on_hyphens=False)


# ---- the steps --------------------------------------------------------------


def steps(story: HeadReport, *, colour: bool = False, width: int = NARROW) -> Iterator[str]:
    """Every step with its shape; the five of attention with their numbers."""
    head = story.head
    for step in story.inputs:
        yield from _step(step, width)
    yield from _cuts(story, width)
    for step in head.steps:
        yield from _step(step, width)
        if step.name == "weighted sum":
            yield from _wrapped(" " * 27 + story.sum_in_words(), width, hang=" " * 27)
        else:
            yield from _numbers(story, step.name, colour, width)
    for step in story.after:
        yield from _step(step, width)
    if story.after and (last := story.after[-1].values) is not None:
        yield from _first_columns(story, last, colour, width)


def _step(step: Step, width: int) -> list[str]:
    number = f"{NUMBERED.index(step.name) + 1}. " if step.name in NUMBERED else ""
    first = f"  {step.name:<12} {in_brackets(step.shape):<11} {number}{step.about}"
    return _wrapped(first, width, hang=" " * 27)


def _numbers(story: HeadReport, name: str, colour: bool, width: int) -> Iterator[str]:
    head, values = story.head, story.head.values(name)
    if name == "output":
        yield from _first_columns(story, values, colour, width)
        return
    # A score is coloured by the weight it leads to: undivided as it stands, divided afterwards.
    weights = head.unscaled if name == "scores" else head.weights
    digits = _DIGITS["weights" if name == "weights" else "scores"]
    if name == "weights":  # a hidden key has none, which is not the same as a small one
        values = np.where(head.logits == -np.inf, -np.inf, values)
    layout = _layout(story, values, digits, width)
    yield from terminal_table.table(values, (head.queries, head.keys), weights, layout, colour=colour)


def _first_columns(story: HeadReport, values: Array, colour: bool, width: int) -> Iterator[str]:
    values = values[:, :_OUTPUT]
    columns = [f"[{j}]" for j in range(values.shape[1])]
    layout = _layout(story, values, range(3, 4), width)
    none = np.zeros(values.shape)
    yield from terminal_table.table(values, (story.head.queries, columns), none, layout, colour=colour)


def _layout(story: HeadReport, values: Array, digits: range, width: int) -> terminal_table.Layout:
    return terminal_table.laid_out(values, story.head.queries, digits=digits, width=width, rows=_ROWS, around=story.row)


def _cuts(story: HeadReport, width: int) -> Iterator[str]:
    """Says it where a table will not show everything."""
    head = story.head
    narrowest = min(len(_layout(story, head.values(name), digits, width).columns) for name, digits in _DIGITS.items())
    T, S = head.scores.shape
    if narrowest == S and T <= _ROWS:
        return
    around = f"around {head.queries[story.row]}" if story.token is not None else "the first ones"
    yield from _wrapped(
        f"  Tables show {min(T, _ROWS)} of {T} rows and at least {narrowest} of {S} columns, "
        f"{around}; a wider terminal shows more, a file all.",
        width,
        hang="  ",
    )


# ---- with and without the scale ---------------------------------------------


def _beside(story: HeadReport, colour: bool, width: int) -> Iterator[str]:
    head = story.head
    titles = (f"scores {head.scale}", "unscaled")
    yield paint("The weights, with the scale and without", "bold", colour)
    yield from terminal_table.beside(
        head.weights,
        head.unscaled,
        (head.queries, head.keys),
        titles,
        colour=colour,
        width=width,
        rows=_ROWS,
        around=story.row,
    )
    yield ""
    room = max(map(terminal_table.room_of, titles))
    for title, gauge in zip(titles, (head.gauge, head.unscaled_gauge), strict=True):
        yield f"  {terminal_table.fitted(title, room)}  {_gauge(gauge, colour)}"
    if story.token is not None:
        yield ""
        yield from _bars(story, titles, colour, width)


def _gauge(gauge: Gauge, colour: bool) -> str:
    entropy = "-" if np.isnan(gauge.normalised_entropy) else f"{gauge.normalised_entropy:.2f}"
    return (
        f"{paint(gauge.picture, gauge.level, colour)} {gauge.level:<9}  H/ln n {entropy}  "
        f"top-1 {gauge.top1:.2f}  max logit {gauge.max_logit:.1f}"
    )


def _bars(story: HeadReport, titles: tuple[str, str], colour: bool, width: int) -> Iterator[str]:
    """The token's row as bars, the largest weights first where there are many keys."""
    head, row = story.head, story.row
    yield paint(f"Where {quoted(head.queries[row])} looks in this head", "bold", colour)
    keys = np.flatnonzero(head.weights[row] + head.unscaled[row] > 0)
    if keys.size > _BARS:
        largest = np.argsort(-head.weights[row][keys], kind="stable")[:_BARS]
        keys = np.sort(keys[largest])
    name = min(max(terminal_table.room_of(key) for key in head.keys), 16)
    room = (width - name - 4 - 2 * 8) // 2
    yield " " * (name + 4) + terminal_table.fitted(titles[0], room + 8) + titles[1]
    for j in keys:
        halves = (
            f"{x[row, j]:.3f} {terminal_table.bar(float(x[row, j]), room)}" for x in (head.weights, head.unscaled)
        )
        yield f"  {terminal_table.fitted(head.keys[j], name)}  {'  '.join(halves)}".rstrip()


# ---- every head -------------------------------------------------------------


def _heads(found: TokenAttention, colour: bool, width: int) -> Iterator[str]:
    yield paint(f"Where {quoted(found.name)} looks in every head", "bold", colour)
    for sentence in found.sentences():
        yield from _wrapped(f"  {sentence}", width, hang="    ")
    yield ""
    yield "  layer head  most weight on        unscaled              on another word"
    for look in found.looks[:_HEADS]:
        word = "-" if look.word is None else _look(found, look.word, look.word_weight)
        yield (
            f"  {look.layer:>5} {look.head:>4}  "
            f"{terminal_table.fitted(_look(found, look.to, look.weight), 20)}  "
            f"{terminal_table.fitted(_look(found, look.unscaled_to, look.unscaled_weight), 20)}  {word}"
        )
    if (rest := len(found.looks) - _HEADS) > 0:
        yield f"  … and {rest} more heads, with less on another word"


def _look(found: TokenAttention, to: int, weight: float) -> str:
    return f"{weight:.2f} {terminal_table.cut(found.named(to), 14)}"
