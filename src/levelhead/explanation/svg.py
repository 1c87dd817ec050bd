"""The block and the weights as SVG, with the shapes written on the arrows.

Shapes only: colours are CSS classes (`look.css`), with plain colours beside them for programs without CSS variables. A
drawing refers to no address, so it works wherever it is pasted. The block for a terminal: `terminal.block`.
"""

from __future__ import annotations

from functools import cache
from html import escape
from pathlib import Path

from levelhead.explanation.head_report import HeadReport
from levelhead.explanation.head_steps import Array, Head, in_brackets
from levelhead.explanation.terminal_table import cut, room_of, window
from levelhead.show.html import style

MOST = 48  # tokens drawn of a long sentence
_LIGHT = {
    "box": 'fill="#f4f1e8" stroke="#8f8a7d"',
    "wire": 'fill="none" stroke="#8f8a7d"',
    "tip": 'fill="#8f8a7d"',
    "heat": 'fill="#0f5490"',
    "cell": 'fill="none" stroke="#e2ded4"',
    "chosen": 'fill="none" stroke="#1d2023"',
}
_LEFT, _RIGHT, _V = 10, 230, 300  # edges of the boxes, x of the arrow of V
_BOX, _PITCH, _TOP = 38, 82, 62  # height of a box, from box to box, the first one
_BLOCK = (360, 480)
_MIDDLING, _DARK = 0.5, 0.7  # weights above which the text on a cell changes colour
_NAME = 12  # characters of a token's name
_NUMBERS_FROM = 26  # pixels of a cell from which its number fits


@cache
def look() -> str:
    """The CSS of pages and drawings."""
    return style() + own_look()


def own_look() -> str:
    """What drawings of an explanation add to the CSS of every page."""
    return Path(__file__).with_name("look.css").read_text(encoding="utf-8")


def standalone(report: HeadReport) -> str:
    """One SVG file: the block, the weights, and the weights without the scale."""
    width, height = _size(report)
    left, top = _BLOCK[0] + 30, 70
    whole = (left + 2 * width + 50, top + max(_BLOCK[1], height) + 20)
    title = escape(f"{cut(report.title, 90)} · {report.head.name}")
    part = extract(report)
    matrices = "".join(
        f'<g transform="translate({x:g} {top})">{_matrix(weights, report, f"weights, {side}")}</g>\n'
        for x, (side, weights, _) in zip((left, left + width + 30), report.head.sides, strict=True)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="lh page" viewBox="0 0 {whole[0]:g} '
        f'{whole[1]:g}" width="{whole[0]:g}" height="{whole[1]:g}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="14">\n<title>{title}</title>\n'
        f"<style>\n{look()}</style>\n"
        f'<text class="name strong" x="20" y="32" font-weight="600">{title}</text>\n'
        f"{part and _text('soft', 20, 52, part, anchor='start')}\n"
        f'<g transform="translate(10 {top})">{_block(report.head)}</g>\n{matrices}</svg>\n'
    )


def _framed(inside: str, size: tuple[float, float], label: str, most: float) -> str:
    """A drawing that grows with the page, up to `most` times its own size."""
    width, height = size
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" style="max-width:{most * width:.0f}px" '
        f'role="img" aria-label="{escape(label)}">{inside}</svg>'
    )


# ---- the block --------------------------------------------------------------


def block(head: Head) -> str:
    """The block on its own."""
    names = " → ".join(name.split("  ")[0] for name, _ in head.boxes)
    return _framed(_block(head), _BLOCK, f"{names} → MatMul, with the shapes on the arrows", 1.15)


def _block(head: Head) -> str:
    middle = (_LEFT + _RIGHT) / 2
    parts = []
    for name, array, x in (("Q", head.q, middle - 55), ("K", head.k, middle + 55), ("V", head.v, _V)):
        parts += [_text("name strong", x, 16, name), _text("soft", x, 32, in_brackets(array.shape))]
        if name != "V":
            parts.append(_arrow(x, 40, _TOP))
    y = float(_TOP)
    for name, result in head.boxes:
        parts.append(_box(_RIGHT, y, name, " idle" if name.startswith("(") else ""))
        parts.append(_arrow(middle, y + _BOX, y + _PITCH))
        parts.append(_text("soft", middle + 10, y + _BOX + 26, result, anchor="start"))
        y += _PITCH
    output = f"output {in_brackets(head.output.shape)}"
    parts += [_arrow(_V, 40, y), _box(_V + 50, y, "MatMul  weights V"), _arrow(middle, y + _BOX, y + _BOX + 40)]
    return "".join((*parts, _text("name", middle + 10, y + _BOX + 34, output, anchor="start")))


def _box(right: float, y: float, name: str, extra: str = "") -> str:
    size = f'x="{_LEFT:g}" y="{y:g}" width="{right - _LEFT:g}" height="{_BOX}"'
    box = f'<rect class="box{extra}" {_LIGHT["box"]} {size} rx="9"/>'
    return box + _text("name", (_LEFT + right) / 2, y + 24, cut(name, 30))


def _arrow(x: float, begin: float, end: float) -> str:
    return (
        f'<path class="wire" {_LIGHT["wire"]} d="M{x:g} {begin:g}V{end - 6:g}"/>'
        f'<path class="tip" {_LIGHT["tip"]} d="M{x - 4:g} {end - 8:g}h8l-4 8z"/>'
    )


def _text(kind: str, x: float, y: float, words: str, *, anchor: str = "middle") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


def ink_on(weight: float) -> str:
    """The class of the text on a cell, by how dark the cell is."""
    return "on" if weight > _DARK else "mid" if weight > _MIDDLING else ""


# ---- the weights ------------------------------------------------------------


def picture(weights: Array, report: HeadReport, label: str) -> str:
    """A matrix on its own."""
    return _framed(_matrix(weights, report), _size(report), label, 1.4)


def shown(report: HeadReport) -> tuple[range, range]:
    """The rows and columns that are drawn."""
    T, S = report.head.weights.shape
    return window(T, MOST, report.row), window(S, MOST, report.row)


def extract(report: HeadReport) -> str:
    """A sentence on how much of a large matrix is drawn; empty if all of it is."""
    rows, columns = shown(report)
    T, S = report.head.weights.shape
    if (len(rows), len(columns)) == (T, S):
        return ""
    return f"Shown are {len(rows)} of {T} rows and {len(columns)} of {S} columns."


def _geometry(report: HeadReport) -> tuple[float, float, float]:
    """Where the cells begin, right of the queries' names and below the keys', and the size of a cell."""
    left, top = (14 + 7.2 * min(max(map(room_of, names)), _NAME) for names in (report.head.queries, report.head.keys))
    return left, 24 + top, min(36.0, max(9.0, 420 / max(map(len, shown(report)))))


def _size(report: HeadReport) -> tuple[float, float]:
    (left, top, cell), (rows, columns) = _geometry(report), shown(report)
    return left + cell * len(columns) + 4, top + cell * len(rows) + 4


def _matrix(weights: Array, report: HeadReport, title: str = "") -> str:
    """Weights as heat, with numbers where they fit; the token's row is framed."""
    (left, top, cell), (rows, columns) = _geometry(report), shown(report)
    heats = "".join(
        _heat(float(weights[i, j]), left + cell * x, top + cell * y, cell)
        for y, i in enumerate(rows)
        for x, j in enumerate(columns)
    )
    width = cell * len(columns)
    frames = _frame("cell", left, top, width, cell * len(rows))
    if report.token is not None:
        frames += _frame("chosen", left, top + cell * (report.token - rows.start), width, cell)
    titled = f'<text class="name" x="0" y="14">{escape(title)}</text>' if title else ""
    return titled + _names(report, left, top, cell) + heats + frames


def _names(report: HeadReport, left: float, top: float, cell: float) -> str:
    """The keys above, rotated; the queries on the left."""
    rows, columns = shown(report)
    size = f"{min(13.0, cell):.3g}"
    kind = f'class="soft" font-size="{size}" style="font-size:{size}px"'
    above = (
        f'<text {kind} transform="translate({left + cell * (x + 0.5) + 4:.1f} {top - 6:g}) '
        f'rotate(-90)">{escape(cut(report.head.keys[j], _NAME))}</text>'
        for x, j in enumerate(columns)
    )
    beside = (
        f'<text {kind} x="{left - 8:g}" y="{top + cell * (y + 0.5) + 4:.1f}" text-anchor="end">'
        f"{escape(cut(report.head.queries[i], _NAME))}</text>"
        for y, i in enumerate(rows)
    )
    return "".join((*above, *beside))


def _frame(kind: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{kind}" {_LIGHT[kind]} x="{x:g}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def _heat(weight: float, x: float, y: float, cell: float) -> str:
    square = (
        f'<rect class="heat" {_LIGHT["heat"]} fill-opacity="{min(weight, 1):.3f}" '
        f'x="{x:.1f}" y="{y:.1f}" width="{cell:.1f}" height="{cell:.1f}"/>'
        if weight >= 0.001
        else ""
    )
    if cell < _NUMBERS_FROM or weight < 0.005:
        return square
    ink = "#fff" if weight > _DARK else "#1d2023"
    return square + (
        f'<text class="value {ink_on(weight)}" fill="{ink}" font-size="11" x="{x + cell / 2:.1f}" '
        f'y="{y + cell / 2 + 4:.1f}" text-anchor="middle">{weight:.2f}</text>'
    )
