"""The block and the weights as SVG, with the shapes written on the arrows.

Shapes only: colours are CSS classes (`look.css`), with plain ones beside them for programs that
know no CSS variables. Nothing is referred to by address, so a drawing works wherever it is pasted.
The block in a terminal: `block`.
"""

from __future__ import annotations

from functools import cache
from html import escape
from pathlib import Path

from levelhead.explanation.head_report import HeadReport
from levelhead.explanation.head_steps import Array, Head, in_brackets
from levelhead.explanation.terminal_block import stages
from levelhead.explanation.terminal_table import cut, room_of, window
from levelhead.show.html import style

__all__ = ["MOST", "block", "extract", "ink_on", "look", "picture", "shown", "standalone"]

MOST = 48  # tokens drawn of a long sentence
_LIGHT = {
    "box": 'fill="#f4f1e8" stroke="#8f8a7d"',
    "wire": 'fill="none" stroke="#8f8a7d"',
    "tip": 'fill="#8f8a7d"',
    "heat": 'fill="#0f5490"',
    "cell": 'fill="none" stroke="#e2ded4"',
    "chosen": 'fill="none" stroke="#1d2023"',
}
_LEFT, _RIGHT, _V = 10, 230, 300  # edges of the boxes, where V comes down
_BOX, _PITCH, _TOP = 38, 82, 62  # height of a box, from box to box, the first one
_BLOCK = (360, 480)
MIDDLING, DARK = 0.5, 0.7  # weights from which a cell's paper asks for another ink
_NAME = 12  # characters of a token's name
_NUMBERS_FROM = 26  # pixels of a cell from which its number fits


@cache
def look() -> str:
    """The style of everything here."""
    return style() + Path(__file__).with_name("look.css").read_text(encoding="utf-8")


def standalone(story: HeadReport) -> str:
    """One SVG file: the block, the weights, and the weights without the scale."""
    head = story.head
    part = extract(story)
    drawn = matrix(head.weights, head, f"weights, scores {head.scale}", story)
    bare = matrix(head.unscaled, head, "weights, unscaled", story)
    width, height = _size(head, story)
    left, top = _BLOCK[0] + 30, 70
    whole = (left + 2 * width + 50, top + max(_BLOCK[1], height) + 20)
    title = escape(f"{cut(story.title, 90)} · {head.name}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="lh page" viewBox="0 0 {whole[0]:g} '
        f'{whole[1]:g}" width="{whole[0]:g}" height="{whole[1]:g}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="14">\n<title>{title}</title>\n'
        f"<style>\n{look()}</style>\n"
        f'<text class="name strong" x="20" y="32" font-weight="600">{title}</text>\n'
        f"{part and _text('soft', 20, 52, part, anchor='start')}\n"
        f'<g transform="translate(10 {top})">{_block(head)}</g>\n'
        f'<g transform="translate({left} {top})">{drawn}</g>\n'
        f'<g transform="translate({left + width + 30:g} {top})">{bare}</g>\n</svg>\n'
    )


def framed(inside: str, size: tuple[float, float], label: str, most: float = 1.4) -> str:
    """A drawing that grows with the page, `most` times its own size at most."""
    width, height = size
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" style="max-width:{most * width:.0f}px" '
        f'role="img" aria-label="{escape(label)}">{inside}</svg>'
    )


# ---- the block --------------------------------------------------------------


def block(head: Head) -> str:
    """The block on its own."""
    said = " → ".join(name.split("  ")[0] for name, _ in stages(head))
    return framed(_block(head), _BLOCK, f"{said} → MatMul, with the shapes on the arrows", 1.15)


def _block(head: Head) -> str:
    boxes, middle = stages(head), (_LEFT + _RIGHT) / 2
    parts = [
        _input("Q", head.q, middle - 55),
        _input("K", head.k, middle + 55),
        _text("name strong", _V, 16, "V") + _text("soft", _V, 32, in_brackets(head.v.shape)),
    ]
    y = float(_TOP)
    for name, leaves in boxes:
        idle = " idle" if name.startswith("(") else ""
        parts.append(_box(_LEFT, _RIGHT, y, name, idle))
        parts.append(_arrow(middle, y + _BOX, y + _PITCH))
        parts.append(_text("soft", middle + 10, y + _BOX + 26, leaves, anchor="start"))
        y += _PITCH
    parts.append(_arrow(_V, 40, y))
    parts.append(_box(_LEFT, _V + 50, y, "MatMul  weights V"))
    parts.append(_arrow(middle, y + _BOX, y + _BOX + 40))
    shape = in_brackets(head.output.shape)
    parts.append(_text("name", middle + 10, y + _BOX + 34, f"output {shape}", anchor="start"))
    return "".join(parts)


def _input(name: str, array: Array, x: float) -> str:
    words = _text("name strong", x, 16, name) + _text("soft", x, 32, in_brackets(array.shape))
    return words + _arrow(x, 40, _TOP)


def _box(left: float, right: float, y: float, name: str, extra: str = "") -> str:
    return (
        f'<rect class="box{extra}" {_LIGHT["box"]} x="{left:g}" y="{y:g}" '
        f'width="{right - left:g}" height="{_BOX}" rx="9"/>' + _text("name", (left + right) / 2, y + 24, cut(name, 30))
    )


def _arrow(x: float, begin: float, end: float) -> str:
    return (
        f'<path class="wire" {_LIGHT["wire"]} d="M{x:g} {begin:g}V{end - 6:g}"/>'
        f'<path class="tip" {_LIGHT["tip"]} d="M{x - 4:g} {end - 8:g}h8l-4 8z"/>'
    )


def _text(kind: str, x: float, y: float, words: str, *, anchor: str = "middle") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


def ink_on(weight: float) -> str:
    """The class of what is written on a cell: how dark its paper is."""
    return "on" if weight > DARK else "mid" if weight > MIDDLING else ""


# ---- the weights ------------------------------------------------------------


def picture(values: Array, story: HeadReport, label: str) -> str:
    """A matrix on its own."""
    return framed(matrix(values, story.head, "", story), _size(story.head, story), label)


def shown(head: Head, story: HeadReport) -> tuple[range, range]:
    """The rows and columns that are drawn."""
    T, S = head.weights.shape
    return window(T, MOST, story.row), window(S, MOST, story.row)


def extract(story: HeadReport) -> str:
    """What is drawn of a matrix that is larger than a picture; nothing of another."""
    rows, columns = shown(story.head, story)
    T, S = story.head.weights.shape
    if (len(rows), len(columns)) == (T, S):
        return ""
    return f"Shown are {len(rows)} of {T} rows and {len(columns)} of {S} columns."


def _cell(head: Head, story: HeadReport) -> float:
    rows, columns = shown(head, story)
    return min(36.0, max(9.0, 420 / max(len(rows), len(columns))))


def _margin(names: tuple[str, ...]) -> float:
    return 14 + 7.2 * min(max(map(room_of, names)), _NAME)


def _size(head: Head, story: HeadReport) -> tuple[float, float]:
    rows, columns = shown(head, story)
    cell = _cell(head, story)
    width = _margin(head.queries) + cell * len(columns) + 4
    return width, 24 + _margin(head.keys) + cell * len(rows) + 4


def matrix(values: Array, head: Head, title: str, story: HeadReport) -> str:
    """Weights as heat, with numbers where they fit; the token's row is framed."""
    rows, columns = shown(head, story)
    cell, left, top = _cell(head, story), _margin(head.queries), 24 + _margin(head.keys)
    names = _names(head, rows, columns, (left, top), cell)
    heats = "".join(
        _heat(float(values[i, j]), (left + cell * x, top + cell * y), cell)
        for y, i in enumerate(rows)
        for x, j in enumerate(columns)
    )
    width = cell * len(columns)
    frames = _frame("cell", left, top, width, cell * len(rows))
    if story.token is not None:
        frames += _frame("chosen", left, top + cell * (story.token - rows.start), width, cell)
    titled = f'<text class="name" x="0" y="14">{escape(title)}</text>' if title else ""
    return titled + names + heats + frames


def _names(head: Head, rows: range, columns: range, corner: tuple[float, float], cell: float) -> str:
    """The keys above, standing; the queries on the left."""
    left, top = corner
    size = f"{min(13.0, cell):.3g}"
    kind = f'class="soft" font-size="{size}" style="font-size:{size}px"'
    above = (
        f'<text {kind} transform="translate({left + cell * (x + 0.5) + 4:.1f} {top - 6:g}) '
        f'rotate(-90)">{escape(cut(head.keys[j], _NAME))}</text>'
        for x, j in enumerate(columns)
    )
    beside = (
        f'<text {kind} x="{left - 8:g}" y="{top + cell * (y + 0.5) + 4:.1f}" text-anchor="end">'
        f"{escape(cut(head.queries[i], _NAME))}</text>"
        for y, i in enumerate(rows)
    )
    return "".join((*above, *beside))


def _frame(kind: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{kind}" {_LIGHT[kind]} x="{x:g}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def _heat(weight: float, corner: tuple[float, float], cell: float) -> str:
    x, y = corner
    square = (
        f'<rect class="heat" {_LIGHT["heat"]} fill-opacity="{min(max(weight, 0), 1):.3f}" '
        f'x="{x:.1f}" y="{y:.1f}" width="{cell:.1f}" height="{cell:.1f}"/>'
        if weight >= 0.001
        else ""
    )
    if cell < _NUMBERS_FROM or weight < 0.005:
        return square
    ink = "#fff" if weight > DARK else "#1d2023"
    return square + (
        f'<text class="value {ink_on(weight)}" fill="{ink}" font-size="11" x="{x + cell / 2:.1f}" '
        f'y="{y + cell / 2 + 4:.1f}" text-anchor="middle">{weight:.2f}</text>'
    )
