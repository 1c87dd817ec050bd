"""The levels of a large model in little space: a row per module, a small vial per head, a few bytes each.

`gauge_svg.grid` has an element per head, with its numbers in a tooltip; here all heads of a row share one path per
level, and the row has a tooltip. What is beyond the limits is counted in words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape

import numpy as np

from levelhead import stats
from levelhead.observation import number
from levelhead.runs.record import Record
from levelhead.show import view
from levelhead.words import module_title, plural

_COLUMNS, _HEADS = 64, 1024  # heads of a module, and of a block, that are drawn
_PITCH_X, _PITCH_Y = 30, 15
_TUBE, _LIQUID = 16, 10  # length and width of the line that is a vial; its round ends come on top


def rows(block: view.Block, marks: Mapping[tuple[str, int | None], str]) -> str:
    """The drawing, and a line that says what it leaves out."""
    heads = min(block.heads, _COLUMNS)
    most = _HEADS // max(heads, 1)
    drawn, rest = block.rows[:most], block.rows[most:]
    left = 24 + 7 * max(len(label) for label, _ in drawn)
    width, height = left + _PITCH_X * heads, 16 + _PITCH_Y * len(drawn)
    every = 1 if heads <= 16 else 4
    titles = "".join(
        f'<text x="{left + _PITCH_X * h + 14}" y="10" text-anchor="middle">{h}</text>' for h in range(0, heads, every)
    )
    inside = "".join(
        f'<g transform="translate(0 {16 + _PITCH_Y * i})"><title>{escape(_tooltip(record))}</title>'
        f'<text x="{left - 8}" y="10" text-anchor="end">{escape(label)}</text>'
        f"{''.join(_row(record, left, marks))}</g>\n"
        for i, (label, record) in enumerate(drawn)
    )
    size = f"width:100%;max-width:{1.2 * width:.0f}px;min-width:{0.6 * width:.0f}px"
    return (
        f'<svg class="rows" viewBox="0 0 {width} {height}" style="{size}" role="img" '
        f'aria-label="{escape(block.name)}: a level for every head">{titles}\n{inside}</svg>'
        f"{''.join(_left_out(block, rest, marks))}"
    )


def _row(record: Record, left: int, marks: Mapping[tuple[str, int | None], str]) -> Iterator[str]:
    """All liquids of a level are one path, all bubbles another: lines with round ends."""
    tubes: dict[str, str] = {}
    ticks, bubbles, alarms = "", "", {"warning": "", "error": ""}
    for h, level in enumerate(record.heads.levels[:_COLUMNS]):
        x = left + _PITCH_X * h + 6
        tubes[level] = f"{tubes.get(level, '')}M{x} 6h{_TUBE}"
        ticks += "".join(f"M{x + end / 8 * _TUBE:g} 1v10" for end in stats.LEVEL_ENDS)
        place = stats.bubble(float(record.heads.normalised_entropy[h]), level)
        if place is not None:
            bubbles += f"M{x + place / 8 * _TUBE:.3g} 6h.01"
        if severity := marks.get((record.module, h)):
            alarms[severity] += f"M{x + _TUBE + 3} -1l4 7h-8z"
    if whole := marks.get((record.module, None)):
        alarms[whole] += "M6 1l5 9h-10z"
    yield from (f'<path class="{level}" stroke-width="{_LIQUID}" d="{d}"/>' for level, d in tubes.items())
    yield f'<path class="k" d="{ticks}"/>'
    yield f'<path class="rim" stroke-width="7.6" d="{bubbles}"/><path class="air" stroke-width="6" d="{bubbles}"/>'
    yield from (f'<path class="{severity}-mark" d="{d}"/>' for severity, d in alarms.items() if d)


def _tooltip(record: Record) -> str:
    largest = np.max(record.heads.max_logit, initial=-np.inf)
    bound = "at least " if record.facts.sampled else ""
    levels = view.listed(view.levels([record]))
    return f"{module_title(record.module)}: {levels}; max logit {bound}{number(largest, 2)}"


def _left_out(
    block: view.Block, rest: tuple[tuple[str, Record], ...], marks: Mapping[tuple[str, int | None], str]
) -> Iterator[str]:
    if rest:
        marked = {module for module, _ in marks}
        found = sum(record.module in marked for _, record in rest)
        alarms = f", {found} of them with an alarm" if found else ""
        yield f'<p class="soft">… {plural(len(rest), "more module")}{alarms}.</p>'
    if block.heads > _COLUMNS:
        yield f'<p class="soft">… {block.heads - _COLUMNS} more heads in a row.</p>'
