"""A run as text, for a terminal or a log: a map of all heads, a line per head, findings and coverage.

Lines keep to the width, except for a module's full name, which is never cut in the table. Colour only repeats what a
glyph shows. `html` shows the same run as a page.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from levelhead import stats
from levelhead.diagnosis.findings import MARKS, Finding, Findings, groups
from levelhead.runs.record import Record, Run
from levelhead.show import view
from levelhead.terminal import paint, width_of
from levelhead.words import module_title

_ROOMY = 104  # from here on three digits fit
_LEFT = ("gauge", "level")
_TWO = {"H/ln n": ("H/", "ln n"), "saturated": ("satu-", "rated"), "gradient left": ("grad.", "left")}


def text(
    run: Run, findings: Sequence[Finding] = (), *, colour: bool = False, width: int | None = None, table: bool = True
) -> str:
    """All of it: map, table, findings, scales tried, coverage, notes and cost.

    Args:
        run: what `watch` or `doctor` recorded; its last snapshot is shown.
        findings: what `diagnose` returned for it.
        colour: with terminal colours.
        width: columns; None: those of the terminal. At least 80.
        table: with a line per head; the map has them all in any case.
    """
    return "\n".join(lines(run, findings, colour=colour, width=width, table=table))


def lines(
    run: Run, findings: Sequence[Finding] = (), *, colour: bool = False, width: int | None = None, table: bool = True
) -> Iterator[str]:
    """The lines of `text`."""
    wide = width_of(width)
    yield from _wrap(paint(f"{run.model}: {view.opening(run)}", "bold", colour), wide)
    records = run.latest
    if records:
        yield ""
        yield from heads_map(run, findings, colour=colour, width=wide)
    if table:
        for record in records:
            yield ""
            yield from module_table(record, colour=colour, width=wide)
    scales = scale_lines(run, colour=colour, width=wide)
    for part in (finding_lines(findings, colour=colour, width=wide), scales, _closing(run, wide)):
        if body := list(part):
            yield ""
            yield from body


def _wrap(words: str, width: int, indent: str = "", hang: str = "") -> list[str]:
    return textwrap.wrap(
        words,
        width,
        initial_indent=indent,
        subsequent_indent=indent + hang,
        break_long_words=False,
        break_on_hyphens=False,
    )


# ---- the map ----------------------------------------------------------------


def heads_map(run: Run, findings: Sequence[Finding] = (), *, colour: bool, width: int) -> Iterator[str]:
    """One glyph per head, a line per module; a mark beside those with an alarm."""
    marked = view.marks(findings)
    for block in view.blocks(run.latest):
        yield from _block(block, marked, colour, width)
    counts = view.levels(run.latest)
    legend = [
        f"{paint(view.GLYPHS[level], level, colour)} {n} {level} ({view.MEANINGS[level]})"
        for level, n in counts.items()
        if n or level not in ("none", "flat")
    ]
    yield from _fill(legend, width)
    if marked:
        marks = (f"{MARKS[severity]} {severity}" for severity in ("warning", "error"))
        yield f"  beside a head or a module: {', '.join(marks)}"


def _block(block: view.Block, marked: Mapping[tuple[str, int | None], str], colour: bool, width: int) -> Iterator[str]:
    yield from _wrap(middle(block.name, width), width)
    labels = [middle(label, width // 3) for label, _ in block.rows]
    margin = max(map(len, labels)) + 4
    cells = min((width - margin) // 2, block.heads)
    for first in range(0, block.heads, cells):
        ticks = [f"{h:<10d}" for h in range(first, min(first + cells, block.heads), 5)]
        yield (" " * margin + "".join(ticks)).rstrip()
        for label, (_, record) in zip(labels, block.rows, strict=True):
            whole = marked.get((record.module, None))
            side = paint(MARKS[whole], whole, colour) if whole else " "
            row = [
                _cell(level, marked.get((record.module, first + h)), colour)
                for h, level in enumerate(record.heads.levels[first : first + cells])
            ]
            yield f"  {label:>{margin - 4}}{side} {''.join(row)}".rstrip()


def _cell(level: stats.Level, severity: str | None, colour: bool) -> str:
    mark = paint(MARKS[severity], severity, colour) if severity else " "
    return paint(view.GLYPHS[level], level, colour) + mark


def middle(name: str, width: int) -> str:
    """The name, shortened in its middle if it is longer: its ends matter most."""
    if len(name) <= width:
        return name
    left = (width - 1) // 2
    return f"{name[:left]}…{name[len(name) - (width - 1 - left) :]}"


def _fill(parts: Sequence[str], width: int) -> Iterator[str]:
    """Parts side by side as far as they fit; escape codes take no room."""
    line, used = "", 0
    for part in parts:
        room = len(part) - part.count("\x1b[0m") * 4 - part.count("\x1b[") // 2 * 5
        if used and used + 3 + room > width:
            yield line
            line, used = "", 0
        line, used = f"{line}{'   ' if used else '  '}{part}", used + 3 + room
    if line:
        yield line


# ---- the table --------------------------------------------------------------


def module_table(record: Record, *, colour: bool, width: int) -> Iterator[str]:
    """A module's full name and facts, then a line per head."""
    yield paint(module_title(record.module), "bold", colour)
    yield from _wrap(view.facts(record), width, "  ")
    columns = view.columns(record, digits=3 if width >= _ROOMY else 2)
    for titles in _fitting(columns, width):
        yield from _rows({title: columns[title] for title in titles}, record, colour)
    if record.weights:
        norms = ", ".join(f"{name} {view.short(x)}" for name, x in record.weights.items())
        yield from _wrap(f"gradient norms of the weights: {norms}", width, "  ")


def _fitting(columns: Mapping[str, Sequence[str]], width: int) -> Iterator[list[str]]:
    """The titles in as few tables side by side as the width allows, each with the head first."""
    first, *rest = columns
    chosen, used = [first], _room(first, columns[first])
    for title in rest:
        room = _room(title, columns[title]) + 1
        if used + room > width and len(chosen) > 1:
            yield chosen
            chosen, used = [first], _room(first, columns[first])
        chosen.append(title)
        used += room
    yield chosen


def _room(title: str, cells: Sequence[str]) -> int:
    return max(map(len, (*_two(title), *cells)))


def _two(title: str) -> tuple[str, str]:
    """A title on two lines: numbers are narrower than the words above them."""
    above, _, below = title.rpartition(" ")
    return _TWO.get(title, (above, below))


def _rows(columns: Mapping[str, Sequence[str]], record: Record, colour: bool) -> Iterator[str]:
    room = {title: _room(title, cells) for title, cells in columns.items()}

    def line(cells: Mapping[str, str]) -> str:
        sides = {title: "<" if title in _LEFT else ">" for title in cells}
        return " ".join(f"{cell:{sides[title]}{room[title]}}" for title, cell in cells.items()).rstrip()

    titles = {title: _two(title) for title in columns}
    if above := line({title: two[0] for title, two in titles.items()}):
        yield above
    yield line({title: two[1] for title, two in titles.items()})
    for h, level in enumerate(record.heads.levels):
        cells = {title: column[h] for title, column in columns.items()}
        painted = line(cells)
        for title in _LEFT if colour else ():
            if title in cells:
                painted = painted.replace(cells[title], paint(cells[title], level, colour), 1)
        yield painted


# ---- findings, scales, the end ----------------------------------------------


def finding_lines(findings: Sequence[Finding], *, colour: bool, width: int) -> Iterator[str]:
    """Each group of findings, within the width."""
    for group in groups(findings):
        yield paint(group.title, group.severity, colour)
        for line in group.lines():
            yield from _wrap(line.strip(), width, "  ", "  ")


def verdict_lines(findings: Findings, width: int) -> Iterator[str]:
    """The verdict and what was not judged, within the width."""
    for line in findings.verdict_lines():
        yield from _wrap(line, width, hang="  ")


def scale_lines(run: Run, *, colour: bool, width: int) -> Iterator[str]:
    """The same heads under every scale rule, as bars of glyphs."""
    rules = view.rules(run)
    if not rules:
        return
    yield "The same heads under other scales:"
    words = {rule: view.listed(counts) for rule, counts in rules.items()}
    room = max(map(len, rules))
    cells = min(24, width - room - 6 - max(map(len, words.values())))
    for rule, counts in rules.items():
        yield f"  {rule:<{room}}  {_bar(counts, cells, colour)}  {words[rule]}"


def _bar(counts: Mapping[str, int], cells: int, colour: bool) -> str:
    """Glyphs in proportion."""
    shares = view.shares(counts, cells)
    return "".join(paint(view.GLYPHS[level] * n, level, colour) for level, n in shares.items() if n)


def _closing(run: Run, width: int) -> Iterator[str]:
    for line in (*view.coverage(run), *filter(None, [run.by_hand]), *run.notes, *view.cost(run)):
        yield from _wrap(line, width, hang="  ")
