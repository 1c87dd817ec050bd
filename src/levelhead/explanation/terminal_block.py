"""The scaled dot-product attention block in box-drawing characters: MatMul → Scale → (Mask) →
SoftMax → MatMul, with the shape of what travels on every arrow.

The same picture as SVG: `drawing`.
"""

from __future__ import annotations

from collections.abc import Iterator

from levelhead.explanation.head_steps import Head, in_brackets
from levelhead.explanation.terminal_table import fitted

__all__ = ["lines", "stages"]

_INNER = 30  # columns inside a box of the left column
_V = 48  # the column in which V comes down
_MIDDLE = 17


def stages(head: Head) -> list[tuple[str, str]]:
    """The boxes between the two products, each with what leaves it."""
    pairs = in_brackets(head.scores.shape)
    mask = ", ".join(head.changes) or "nothing is hidden"
    after_mask = "masked" if head.changes else "as before"
    return [
        ("MatMul  Q Kᵀ", f"scores {pairs}"),
        (f"Scale  {head.scale}", f"scaled {pairs}"),
        (f"Mask  {mask}" if head.changes else f"(Mask  {mask})", f"{after_mask} {pairs}"),
        ("SoftMax  of each row", f"weights {pairs}"),
    ]


def lines(head: Head) -> Iterator[str]:
    """The picture, at most 70 columns wide."""
    q, k, v = (f"{name} {in_brackets(x.shape)}" for name, x in zip("QKV", (head.q, head.k, head.v), strict=True))
    yield f"    {q:<18}{k:<24}{v}"
    yield _with_v("         │                 │")
    boxes = stages(head)
    for i, (name, leaves) in enumerate(boxes):
        yield _with_v("  ┌" + _arrows(_INNER, (6, 24) if i == 0 else (_MIDDLE - 3,)) + "┐")
        yield _with_v("  │" + _centred(name, _INNER) + "│")
        yield _with_v("  └" + _put("─" * _INNER, _MIDDLE - 3, "┬") + "┘")
        yield _with_v(" " * _MIDDLE + "│ " + leaves)
    wide = _V - 1
    yield "  ┌" + _put(_arrows(wide, (_MIDDLE - 3,)), _V - 3, "▼") + "┐"
    yield "  │" + _centred("MatMul  weights V", wide) + "│"
    yield "  └" + _put("─" * wide, _MIDDLE - 3, "┬") + "┘"
    yield " " * _MIDDLE + f"▼ output {in_brackets(head.output.shape)}"


def _with_v(text: str) -> str:
    return fitted(text, _V) + "│"


def _arrows(width: int, places: tuple[int, ...]) -> str:
    line = "─" * width
    for place in places:
        line = _put(line, place, "▼")
    return line


def _put(line: str, place: int, mark: str) -> str:
    return line[:place] + mark + line[place + 1 :]


def _centred(text: str, room: int) -> str:
    text = fitted(text, room).rstrip()
    left = (room - len(text)) // 2
    return fitted(" " * left + text, room)
