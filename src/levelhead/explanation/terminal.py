"""The report of a head in a terminal: the block, the steps with their numbers, scaled beside unscaled.

Lines keep to the given width, at least 80 columns; a line says what is cut. Colour only repeats the numbers.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import numpy as np

from levelhead.explanation.head_report import HeadReport
from levelhead.explanation.head_steps import Array, Gauge, Head, Step, in_brackets
from levelhead.explanation.terminal_table import ROWS, bar, beside, cut, fitted, layout, room_of, table
from levelhead.explanation.token_attention import TokenAttention
from levelhead.explanation.tokens import quoted
from levelhead.observation import number
from levelhead.terminal import NARROW, paint, width_of

_HEADS = 12  # lines of the table of heads
_BARS = 16  # keys in the list of bars
_OUTPUT = 6  # columns of the output
_INDENT = " " * 27  # of the lines that continue a step
_BOX = 30  # columns inside a box of the block
_ARROW, _ARROW_OF_V = 17, 48  # columns of the arrows between the boxes
_DIGITS = {"scores": range(4), "weights": range(2, 5)}  # after the point, as room allows


def lines(report: HeadReport, *, colour: bool = False, width: int | None = None) -> Iterator[str]:
    """The whole report."""
    width = width_of(width)
    yield from (paint(line, "bold", colour) for line in _wrapped(report.title, width))
    yield from _wrapped(report.about, width)
    for note in report.notes:
        yield from _wrapped(f"· {note}", width, hang="  ")
    yield ""
    yield from block(report.head)
    yield ""
    yield from steps(report, colour=colour, width=width)
    yield ""
    yield from _beside(report, colour, width)
    if report.attended is not None:
        yield ""
        yield from _heads(report.attended, colour, width)


def _wrapped(text: str, width: int, hang: str = "") -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=hang, break_on_hyphens=False)


# ---- the block --------------------------------------------------------------


def block(head: Head) -> Iterator[str]:
    """MatMul → Scale → (Mask) → SoftMax → MatMul, with a shape on every arrow; at most 70 columns wide."""
    q, k, v = (f"{name} {in_brackets(x.shape)}" for name, x in (("Q", head.q), ("K", head.k), ("V", head.v)))
    yield f"    {q:<18}{k:<24}{v}"
    yield _with_v("         │                 │")
    for i, (name, result) in enumerate(head.boxes):
        top, middle, bottom = _boxed(name, _BOX, (6, 24) if i == 0 else (_ARROW - 3,))
        yield from map(_with_v, (top, middle, bottom, " " * _ARROW + "│ " + result))
    yield from _boxed("MatMul  weights V", _ARROW_OF_V - 1, (_ARROW - 3, _ARROW_OF_V - 3))
    yield " " * _ARROW + f"▼ output {in_brackets(head.output.shape)}"


def _with_v(text: str) -> str:
    return fitted(text, _ARROW_OF_V) + "│"


def _boxed(name: str, width: int, arrows: tuple[int, ...]) -> tuple[str, str, str]:
    """Top, text and bottom of a box, with arrows into it and one out of it."""
    top, bottom = ["─"] * width, ["─"] * width
    for column in arrows:
        top[column] = "▼"
    bottom[_ARROW - 3] = "┬"
    text = fitted(name, width).rstrip()
    text = fitted(" " * ((width - len(text)) // 2) + text, width)
    return f"  ┌{''.join(top)}┐", f"  │{text}│", f"  └{''.join(bottom)}┘"


# ---- the steps --------------------------------------------------------------


def steps(report: HeadReport, *, colour: bool = False, width: int = NARROW) -> Iterator[str]:
    """Every step with its shape; the five of attention with their numbers."""
    for step in report.inputs:
        yield from _step(step, width)
    yield from _cuts(report, width)
    for step in report.head.steps:
        yield from _step(step, width)
        if step.name == "weighted sum":
            yield from _wrapped(_INDENT + report.sum_in_words(), width, hang=_INDENT)
        elif step.name == "output":
            yield from _first_columns(report, report.head.output, colour, width)
        else:
            values, weights = report.head.table(step.name)
            digits = _DIGITS["weights" if step.name == "weights" else "scores"]
            yield from table(report, values, report.head.keys, weights, digits, colour=colour, width=width)
    for step in report.after:
        yield from _step(step, width)
    if report.after and (last := report.after[-1].values) is not None:
        yield from _first_columns(report, last, colour, width)


def _step(step: Step, width: int) -> list[str]:
    line = f"  {step.name:<12} {in_brackets(step.shape):<11} {step.number}{step.about}"
    return _wrapped(line, width, hang=_INDENT)


def _first_columns(report: HeadReport, values: Array, colour: bool, width: int) -> Iterator[str]:
    values = values[:, :_OUTPUT]
    names = [f"[{j}]" for j in range(values.shape[1])]
    yield from table(report, values, names, np.zeros(values.shape), range(3, 4), colour=colour, width=width)


def _cuts(report: HeadReport, width: int) -> list[str]:
    """A sentence about the tables that will not show everything."""
    head = report.head
    narrowest = min(len(layout(report, head.values(name), digits, width).columns) for name, digits in _DIGITS.items())
    T, S = head.scores.shape
    if narrowest == S and T <= ROWS:
        return []
    around = f"around {head.queries[report.row]}" if report.token is not None else "the first ones"
    shown = f"  Tables show {min(T, ROWS)} of {T} rows and at least {narrowest} of {S} columns, {around}"
    return _wrapped(f"{shown}; a wider terminal shows more, a file all.", width, hang="  ")


# ---- with and without the scale ---------------------------------------------


def _beside(report: HeadReport, colour: bool, width: int) -> Iterator[str]:
    sides = report.head.sides
    yield paint("The weights, with the scale and without", "bold", colour)
    yield from beside(report, colour=colour, width=width)
    yield ""
    room = max(room_of(title) for title, _, _ in sides)
    for title, _, gauge in sides:
        yield f"  {fitted(title, room)}  {_gauge(gauge, colour)}"
    if report.token is not None:
        yield ""
        yield from _bars(report, colour, width)


def _gauge(gauge: Gauge, colour: bool) -> str:
    return (
        f"{paint(gauge.picture, gauge.level, colour)} {gauge.level:<9}  H/ln n {number(gauge.normalised_entropy, 2)}  "
        f"top-1 {gauge.top1:.2f}  max logit {gauge.max_logit:.1f}"
    )


def _bars(report: HeadReport, colour: bool, width: int) -> Iterator[str]:
    """The token's row as bars; of many keys those with the largest weights."""
    head, row = report.head, report.row
    yield paint(f"Where {quoted(head.queries[row])} looks in this head", "bold", colour)
    keys = np.flatnonzero(head.weights[row] + head.unscaled[row] > 0)
    if keys.size > _BARS:
        largest = np.argsort(-head.weights[row][keys], kind="stable")[:_BARS]
        keys = np.sort(keys[largest])
    name = min(max(map(room_of, head.keys)), 16)
    room = (width - name - 4 - 2 * 8) // 2
    (scaled, *_), (unscaled, *_) = head.sides
    yield " " * (name + 4) + fitted(scaled, room + 8) + unscaled
    for j in keys:
        weights = (float(x[row, j]) for _, x, _ in head.sides)
        halves = (f"{weight:.3f} {bar(weight, room)}" for weight in weights)
        yield f"  {fitted(head.keys[j], name)}  {'  '.join(halves)}".rstrip()


# ---- every head -------------------------------------------------------------


def _heads(attended: TokenAttention, colour: bool, width: int) -> Iterator[str]:
    yield paint(f"Where {quoted(attended.name)} looks in every head", "bold", colour)
    for sentence in attended.sentences():
        yield from _wrapped(f"  {sentence}", width, hang="    ")
    yield ""
    yield "  layer head  most weight on        unscaled              on another word"
    for look in attended.looks[:_HEADS]:
        scaled, unscaled, word = (f"{weight:.2f} {cut(to, 14)}" if to else "-" for to, weight in attended.cells(look))
        yield f"  {look.layer:>5} {look.head:>4}  {fitted(scaled, 20)}  {fitted(unscaled, 20)}  {word}"
    if (rest := len(attended.looks) - _HEADS) > 0:
        yield f"  … and {rest} more heads, with less on another word"
