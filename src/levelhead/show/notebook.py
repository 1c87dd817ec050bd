"""How levelhead's objects draw themselves in a notebook: observations, watches, runs, findings.

Each output is one `<div class="lh note">` with its own style: no script, no address, no rule that reaches out of it.
Text has the notebook's colour, light or dark. Where a program drops drawings, the words beside them remain. Sizes are
bounded: what is left out is counted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from html import escape
from pathlib import Path

from levelhead import stats
from levelhead.diagnosis.diagnose import diagnose
from levelhead.diagnosis.findings import Finding, Findings, groups
from levelhead.runs.record import Record, Run, Snapshot
from levelhead.show import curves_svg, gauge_rows_svg, gauge_svg, html_parts, view
from levelhead.words import module_title, plural


def gauge(normalised_entropy: float, level: stats.Level) -> str:
    """The spirit level, as a drawing; `stats.gauge` has it as text."""
    return gauge_svg.picture(level, normalised_entropy)


_WITH_TOOLTIPS = 64  # heads up to which each vial has its numbers in a tooltip
_NUMBERS = 32  # heads whose numbers are in the folded table
_PATHS = 12  # coverage lines


@cache
def style() -> str:
    """The CSS of an output, without comments and line breaks."""
    here = Path(__file__)
    text = "".join(here.with_name(name).read_text(encoding="utf-8") for name in ("parts.css", "notebook.css"))
    return re.sub(r"/\*.*?\*/|\n", "", text, flags=re.DOTALL)


def fragment(inside: str, css: str = "") -> str:
    """One output; `inside` is escaped already, `css` are further rules."""
    return f'<div class="lh note"><style>{style()}{css}</style>{inside}</div>'


# ---- observations -----------------------------------------------------------


def table(title: str, lines: Sequence[Sequence[str]], rest: Sequence[str], most: int) -> str:
    """A table of titles and cells, where the cells of the gauge are drawings already."""
    titles, *cells = lines
    at = titles.index("gauge")
    head = "".join(f'<th scope="col"{html_parts.word(name)}>{escape(name)}</th>' for name in titles)
    rows = "".join(
        "<tr>"
        + "".join(
            f"<td{html_parts.word(titles[i])}>{cell if i == at else escape(cell)}</td>" for i, cell in enumerate(line)
        )
        + "</tr>"
        for line in cells[:most]
    )
    more = "".join(f'<p class="soft">{escape(line)}</p>' for line in rest)
    caption = f"<caption>{escape(title)}</caption>"
    return fragment(
        f'<div class="scroll"><table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{more}'
    )


# ---- runs -------------------------------------------------------------------


def run(run: Run, findings: Sequence[Finding] | None = None) -> str:
    """Verdict, history, the map of levels, findings; numbers folded. Without findings: those of `diagnose`."""
    if findings is None:
        findings = diagnose(run) if run.latest else ()
    coverage = list(view.coverage(run))
    if len(coverage) > _PATHS:
        coverage[_PATHS:] = [f"… {len(coverage) - _PATHS} more lines"]
    closing = "".join(f'<p class="soft">{escape(line)}</p>' for line in (*coverage, *run.notes, *view.cost(run)))
    found = "".join(html_parts.finding(group, every_place=False) for group in groups(findings))
    return fragment(
        f"<p><b>{escape(run.model)}</b>: {escape(view.opening(run))}</p>"
        f"{html_parts.verdict(findings)}{_maps(run.latest, findings)}{found}"
        f"{curves_svg.charts(run)}{_numbers(run.latest)}{closing}"
    )


def snapshot(snapshot: Snapshot) -> str:
    """The map of a step."""
    heads = sum(len(record.tally) for record in snapshot.records)
    title = f"Step {snapshot.step}: {plural(heads, 'head')} in {plural(len(snapshot.records), 'attention module')}"
    return fragment(f"<p><b>{title}</b></p>{_maps(snapshot.records, ())}{_numbers(snapshot.records)}")


def record(record: Record) -> str:
    """The facts and the numbers of one module."""
    rest = len(record.tally) - _NUMBERS
    more = f'<p class="soft">… {plural(rest, "more head")}.</p>' if rest > 0 else ""
    return fragment(
        f'<p><b>{escape(module_title(record.module))}</b></p><p class="soft">{escape(view.facts(record))}</p>'
        f'<div class="scroll">{html_parts.table(record, most=_NUMBERS)}</div>{more}'
    )


def _maps(records: Sequence[Record], findings: Sequence[Finding]) -> str:
    if not records:
        return ""
    marks = view.marks(findings)
    few = sum(len(record.tally) for record in records) <= _WITH_TOOLTIPS
    figures = ""
    for block in view.blocks(records):
        drawn = gauge_svg.grid(block, marks, {}, largest=1.0) if few else gauge_rows_svg.rows(block, marks)
        figures += f'<figure>{_caption(block)}<div class="scroll">{drawn}</div></figure>\n'
    return f"{figures}<p>{view.listed(view.levels(records))}</p>"


def _caption(block: view.Block) -> str:
    return f"<figcaption>{escape(block.name)}: a row per module, a level per head</figcaption>"


def _numbers(records: Sequence[Record]) -> str:
    """The numbers of the first heads, folded."""
    left, tables = _NUMBERS, []
    for record in records:
        if left <= 0:
            break
        title = f"<p>{escape(module_title(record.module))}</p>"
        tables.append(f'{title}<div class="scroll">{html_parts.table(record, most=left)}</div>')
        left -= len(record.tally)
    heads = sum(len(record.tally) for record in records)
    summary, rest = "every number", ""
    if heads > _NUMBERS:
        summary = f"numbers of the first {_NUMBERS} of {heads} heads"
        rest = '<p class="soft">A module\'s record shows the others: <code>watch.last["its name"]</code>.</p>'
    return f"<details><summary>{summary}</summary>{''.join(tables)}{rest}</details>" if tables else ""


# ---- findings ---------------------------------------------------------------


def findings(findings: Findings) -> str:
    """The counts, the verdict, and every group of findings."""
    found = "".join(html_parts.finding(group, every_place=False) for group in groups(findings))
    return fragment(f"<p><b>{escape(findings.title)}</b></p>{html_parts.verdict(findings)}{found}")


def finding(finding: Finding) -> str:
    """One of them."""
    (group,) = groups([finding])
    return fragment(html_parts.finding(group, every_place=False))
