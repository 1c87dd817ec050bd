"""A run as one HTML file, and as a smaller drawing for notebooks.

Self-contained: its style is inlined from `html.css`, its pictures are inline SVG, and it has no script and no network
access. Every string from a model or a file is escaped. `view` chooses the words; `text` shows the same run as text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path

from levelhead.diagnosis.compare import Comparison
from levelhead.diagnosis.diagnose import diagnose
from levelhead.diagnosis.findings import SHOWN, Finding, Group, counted, groups
from levelhead.runs.counterfactual import AS_IT_IS, counterfactual
from levelhead.runs.record import Record, Run
from levelhead.show import curves_svg, gauge_svg, view
from levelhead.words import module_title

_OPEN = 100  # heads up to which every table starts unfolded


@cache
def style() -> str:
    """The CSS of every page of levelhead."""
    return Path(__file__).with_name("html.css").read_text(encoding="utf-8")


def html(run: Run, findings: Sequence[Finding] = (), comparison: Comparison | None = None) -> str:
    """The whole page."""
    curves = curves_svg.charts(run)
    history = f"<section>\n<h2>Over the steps</h2>\n{curves}</section>\n" if curves else ""
    opening = _header(run, findings) + _verdict(findings) + history + _maps(run, findings, linked=True)
    opening += _findings(findings)
    numbers = _compared(comparison) + _scales(run) + _tables(run) + _coverage(run)
    return document(run.model, style(), f"{opening}{numbers}\n{_footer(run)}")


def document(title: str, css: str, body: str) -> str:
    """A self-contained HTML file."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)} · levelhead</title>\n<style>\n{css}</style>\n</head>\n"
        f'<body class="lh page">\n<main>\n{body}</main>\n</body>\n</html>\n'
    )


def notebook(run: Run, findings: Sequence[Finding] = ()) -> str:
    """The map and the findings, for `_repr_html_`, in the notebook's own colours."""
    items = "".join(f"<li><b>{escape(group.title)}</b>: {escape(group.places[0])}</li>" for group in groups(findings))
    closing = "".join(f'<p class="soft">{escape(line)}</p>' for line in (*view.coverage(run), *view.cost(run)))
    return (
        f'<div class="lh note"><style>\n{style()}</style>'
        f"<p><b>{escape(run.model)}</b>: {escape(view.opening(run))}</p>"
        f"{_verdict(findings)}{curves_svg.charts(run)}"
        f"{_maps(run, findings, linked=False)}<p>{view.listed(view.levels(run.latest))}</p><ul>{items}</ul>"
        f"{_numbers(run)}{closing}</div>"
    )


def notebook_of(run: Run) -> str:
    """The same with the findings that `diagnose` has."""
    return notebook(run, diagnose(run) if run.latest else ())


def _numbers(run: Run) -> str:
    """Every number of every head, folded."""
    tables = "".join(
        f'<p>{escape(module_title(record.module))}</p><div class="scroll">{_table(record)}</div>'
        for record in run.latest
    )
    return f"<details><summary>every number</summary>{tables}</details>" if tables else ""


def _verdict(findings: Sequence[Finding]) -> str:
    """What to think of it, and what was not judged; nothing for findings that come without one."""
    said = getattr(findings, "verdict", None)
    if said is None:
        return ""
    worst = getattr(findings, "worst", None) or "note"
    limits = f"<details><summary>not judged</summary>{_items(said.not_judged)}</details>\n" if said.not_judged else ""
    return f'<p class="verdict {escape(worst)}">{escape(said.sentence[:1].upper() + said.sentence[1:])}.</p>\n{limits}'


# ---- the head of the page ---------------------------------------------------


def _header(run: Run, findings: Sequence[Finding]) -> str:
    counts = view.levels(run.latest)
    tiles = "".join(
        f"<li>{gauge_svg.picture(level)}<b>{n}</b> {level}<span>{view.MEANINGS[level]}</span></li>\n"
        for level, n in counts.items()
        if n or level != "none"
    )
    return (
        f'<header>\n<div class="brand">{gauge_svg.picture("level")}levelhead</div>\n'
        f"<h1>{escape(run.model)}</h1>\n<p>{escape(view.opening(run)).capitalize()}.</p>\n"
        f'<p class="soft">{escape(counted(findings)).capitalize()}.</p>\n</header>\n'
        f'<ul class="tiles">\n{tiles}</ul>\n'
    )


def _maps(run: Run, findings: Sequence[Finding], *, linked: bool) -> str:
    if not run.latest:
        return "<p>No attention was seen.</p>\n"
    marks = view.marks(findings)
    anchors = _anchors(run) if linked else {}
    figures = "".join(
        f"<figure><figcaption>{escape(block.name)}</figcaption>"
        f'<div class="scroll">{gauge_svg.grid(block, marks, anchors)}</div></figure>\n'
        for block in view.blocks(run.latest)
    )
    if not linked:
        return figures
    return (
        '<section>\n<h2>Every head</h2>\n<p class="soft">A row is a layer, a column a head. Bubble left: attention '
        "spread over all keys. Bubble right: all on one key. In the middle: level. Trained models have sharp and "
        f"saturated heads on purpose; this is a description, not a verdict.</p>\n{figures}</section>\n"
    )


def _anchors(run: Run) -> dict[str, str]:
    return {record.module: f"m{i}" for i, record in enumerate(run.latest)}


# ---- findings and scales ----------------------------------------------------


def _findings(findings: Sequence[Finding]) -> str:
    shown = "".join(map(_finding, groups(findings))) or "<p>No findings.</p>\n"
    return f"<section>\n<h2>Findings</h2>\n{shown}</section>\n"


def _finding(group: Group) -> str:
    places = [f"<li>{escape(place)}</li>" for place in group.places]
    listed = f"<ul>{''.join(places[:SHOWN])}</ul>"
    if rest := places[SHOWN:]:
        listed += f"<details><summary>{len(rest)} more</summary><ul>{''.join(rest)}</ul></details>"
    return (
        f'<article class="finding {escape(group.severity)}"><h3>'
        f'<span class="severity">{escape(group.severity)}</span>{escape(group.kind)}</h3>{listed}'
        f"<dl><dt>why</dt><dd>{escape(group.why)}</dd><dt>try</dt><dd>{escape(group.advice)}</dd>"
        f"{_link(group.link)}</dl></article>\n"
    )


def _link(link: str) -> str:
    """Where to read; only a web address can be clicked."""
    if not link:
        return ""
    shown = escape(link)
    if link.startswith(("https://", "http://")):
        shown = f'<a href="{shown}" rel="noopener noreferrer">{shown}</a>'
    return f"<dt>read</dt><dd>{shown}</dd>"


def _scales(run: Run) -> str:
    rules = view.rules(run)
    if not rules:
        return ""
    bars = "".join(_bar(rule, counts) for rule, counts in rules.items())
    tried = counterfactual(run)
    sentences = "; ".join(tried.sentence(rule) for rule in tried.rules if rule != AS_IT_IS)
    return (
        '<section>\n<h2>The same heads under other scales</h2>\n<p class="soft">Same queries, same '
        f"keys; only the number that multiplies q·k is another: {escape(sentences)}.</p>\n"
        f'<figure><div class="bars">\n{bars}</div></figure>\n</section>\n'
    )


def _bar(name: str, counts: Mapping[str, int]) -> str:
    total = sum(counts.values())
    parts = "".join(
        f'<i class="{level}" style="width:{100 * n / total:.2f}%" title="{n} {level}">'
        f"{n if n / total > 0.04 else ''}</i>"
        for level, n in counts.items()
        if n
    )
    kind, label = ' class="now"' if name == AS_IT_IS else "", view.listed(counts)
    return f'<div{kind}>{escape(name)}</div><div class="bar" role="img" aria-label="{label}">{parts}</div>\n'


def _compared(comparison: Comparison | None) -> str:
    if comparison is None:
        return ""
    title, *rest = comparison.lines()
    return f"<section>\n<h2>{escape(title.rstrip(':'))}</h2>\n{_items(rest)}</section>\n"


# ---- numbers ----------------------------------------------------------------


def _tables(run: Run) -> str:
    anchors = _anchors(run)
    heads = sum(len(record.tally) for record in run.latest)
    unfolded = " open" if heads <= _OPEN else ""
    tables = "".join(
        f"<details{unfolded}><summary>{escape(module_title(record.module))}</summary>"
        f'<p class="soft"><small>{escape(view.facts(record))}</small></p>'
        f'<div class="scroll">{_table(record, anchors[record.module])}</div></details>\n'
        for record in run.latest
    )
    return f"<section>\n<h2>Every number</h2>\n{tables}</section>\n" if tables else ""


def _table(record: Record, anchor: str = "") -> str:
    columns = view.columns(record)
    titles = "".join(f'<th scope="col"{_word(title)}>{escape(title)}</th>' for title in columns)
    ids = [f' id="{anchor}h{h}"' if anchor else "" for h in range(len(record.tally))]
    rows = "".join(f"<tr{id}>{''.join(_cells(columns, record, h))}</tr>\n" for h, id in enumerate(ids))
    return f"<table><thead><tr>{titles}</tr></thead>\n<tbody>{rows}</tbody></table>"


def _cells(columns: Mapping[str, Sequence[str]], record: Record, head: int) -> Iterator[str]:
    for title, cells in columns.items():
        if title == "head":
            yield f'<th scope="row">{head}</th>'
        elif title == "gauge":
            level = record.heads.levels[head]
            yield f"<td>{gauge_svg.picture(level, float(record.heads.normalised_entropy[head]))}</td>"
        else:
            yield f"<td{_word(title)}>{escape(cells[head])}</td>"


def _word(title: str) -> str:
    return ' class="word"' if title in ("gauge", "level") else ""


def _coverage(run: Run) -> str:
    lines = (*view.coverage(run), *run.notes, *view.cost(run))
    if not lines:
        return ""
    return f"<section>\n<h2>What was seen, and what it cost</h2>\n{_items(lines)}</section>\n"


def _items(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>\n"


def _footer(run: Run) -> str:
    return (
        "<footer>H/ln n: entropy of the weights over the logarithm of the visible keys, 1 is "
        "uniform. top-1: mean largest weight. at b,q,k: batch row, query and key of the largest "
        "logit. saturated: rows whose top-1 is 0.99 or more. gradient left: mean of 1 − Σp², what "
        f"the softmax lets through. Made by levelhead {escape(run.version)}.</footer>\n"
    )
