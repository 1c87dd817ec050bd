"""The spirit level drawn as SVG: one vial, and a grid of them for a model's heads.

Shapes only: colours are CSS classes (`parts.css`), and no address is used, so a drawing works wherever it is pasted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape

from levelhead import stats
from levelhead.observation import number
from levelhead.runs.record import Record
from levelhead.show import view
from levelhead.words import module_title

WIDTH, HEIGHT = 48, 18  # of a vial, in user units
_PITCH_X, _PITCH_Y = 54, 26
_SMALLEST, _LARGEST = 0.65, 1.5  # of its own size on a page: below the first a grid scrolls

# A bubble in the middle of its level's cells, for legends.
_TYPICAL: Mapping[stats.Level, float] = {"flat": 0.5, "level": 4.0, "sharp": 6.4, "saturated": 8.0}
_MARKS = {
    "warning": f'<path class="warning-mark" d="M{WIDTH} -4l6.5 11h-13z"/>',
    "error": f'<path class="error-mark" d="M{WIDTH - 1} -6l7.5 7.5-7.5 7.5-7.5-7.5z"/>',
}


def picture(level: stats.Level, normalised_entropy: float = math.nan) -> str:
    """One vial; without an entropy the bubble is in the middle of its level."""
    at = _TYPICAL.get(level)
    if not math.isnan(normalised_entropy):
        at = stats.bubble(normalised_entropy, level)
    box = f"-1 -1 {WIDTH + 2} {HEIGHT + 2}"
    return f'<svg viewBox="{box}" role="img" aria-label="{level}">{_vial(level, at)}</svg>'


def grid(
    block: view.Block,
    marks: Mapping[tuple[str, int | None], str],
    anchors: Mapping[str, str],
    largest: float = _LARGEST,
) -> str:
    """A row per module, a vial per head; with anchors each vial leads to its line of numbers."""
    left = 28 + 7 * max(len(label) for label, _ in block.rows)
    width = left + _PITCH_X * block.heads + 6
    height = 20 + _PITCH_Y * len(block.rows)
    titles = "".join(
        f'<text x="{left + _PITCH_X * h + WIDTH / 2:g}" y="10" text-anchor="middle">{h}</text>'
        for h in range(block.heads)
    )
    rows = "".join(
        f'<g transform="translate(0 {20 + _PITCH_Y * i})">'
        f'<text x="{left - 10}" y="13" text-anchor="end">{escape(label)}</text>'
        f"{_row(record, left, marks, anchors)}</g>\n"
        for i, (label, record) in enumerate(block.rows)
    )
    size = f"width:100%;max-width:{width * largest:.0f}px;min-width:{width * _SMALLEST:.0f}px"
    return (
        f'<svg viewBox="0 0 {width} {height}" style="{size}" role="group" '
        f'aria-label="{escape(block.name)}: a level for every head">{titles}\n{rows}</svg>'
    )


def _row(record: Record, left: int, marks: Mapping[tuple[str, int | None], str], anchors: Mapping[str, str]) -> str:
    cells = []
    for h, level in enumerate(record.heads.levels):
        severity = marks.get((record.module, h))
        at = stats.bubble(float(record.heads.normalised_entropy[h]), level)
        inside = f"<title>{escape(_tooltip(record, h))}</title>{_vial(level, at)}"
        inside += _MARKS[severity] if severity else ""
        shift = f'transform="translate({left + _PITCH_X * h} 0)"'
        anchor = anchors.get(record.module)
        link = f'a class="cell" href="#{anchor}h{h}"' if anchor else "g"
        cells.append(f"<{link} {shift}>{inside}</{link[0]}>")
    if whole := marks.get((record.module, None)):  # of the module: in front of its label
        cells.append(f'<g transform="translate({8 - WIDTH} 7)">{_MARKS[whole]}</g>')
    return "".join(cells)


def _tooltip(record: Record, head: int) -> str:
    heads = record.heads
    bound = "at least " if record.facts.sampled else ""
    return (
        f"{module_title(record.module)}, head {head}: {heads.levels[head]}, "
        f"H/ln n {number(heads.normalised_entropy[head])}, top-1 {number(heads.mean_top1[head])}, "
        f"max logit {bound}{number(heads.max_logit[head], 2)} at {view.place(record, head)}, "
        f"{number(100 * heads.saturated[head], 0, '%')} of rows saturated"
    )


def _vial(level: stats.Level, place: float | None) -> str:
    """Liquid, its shine, marks where "level" begins and ends, and the bubble."""
    begin, end = map(_across, stats.LEVEL_ENDS)
    parts = [
        f'<rect class="v {level}" width="{WIDTH}" height="{HEIGHT}" rx="9"/>',
        f'<rect class="g" x="5" y="2" width="{WIDTH - 10}" height="5" rx="2.5"/>',
        f'<path class="k" d="M{begin:g} 0V{HEIGHT}M{end:g} 0V{HEIGHT}"/>',
    ]
    if place is not None:
        parts.append(f'<ellipse class="b" cx="{_across(place):.1f}" cy="8.5" rx="6" ry="5.5"/>')
    return "".join(parts)


def _across(place: float) -> float:
    return 8 + place / 8 * (WIDTH - 16)
