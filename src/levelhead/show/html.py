"""A run as one HTML file.

Self-contained: its style is inlined from `parts.css` and `html.css`, its pictures are inline SVG, and it has no script
and no network access. Every string from a model or a file is escaped. `view` chooses the words; `text` and `notebook`
show the same run elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path

from levelhead.diagnosis.compare import Comparison
from levelhead.diagnosis.findings import Finding, counted, groups
from levelhead.runs.counterfactual import AS_IT_IS, counterfactual
from levelhead.runs.record import Run
from levelhead.show import curves_svg, gauge_svg, html_parts, view
from levelhead.words import module_title

_OPEN = 100  # heads up to which every table starts unfolded


@cache
def style() -> str:
    """The CSS of every page of levelhead."""
    return "".join(Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("parts.css", "html.css"))


def html(run: Run, findings: Sequence[Finding] = (), comparison: Comparison | None = None) -> str:
    """The whole page."""
    curves = curves_svg.charts(run)
    history = f"<section>\n<h2>Over the steps</h2>\n{curves}</section>\n" if curves else ""
    opening = _header(run, findings) + html_parts.verdict(findings) + history + _maps(run, findings)
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


def _maps(run: Run, findings: Sequence[Finding]) -> str:
    if not run.latest:
        return "<p>No attention was seen.</p>\n"
    marks = view.marks(findings)
    anchors = _anchors(run)
    figures = "".join(
        f"<figure><figcaption>{escape(block.name)}</figcaption>"
        f'<div class="scroll">{gauge_svg.grid(block, marks, anchors)}</div></figure>\n'
        for block in view.blocks(run.latest)
    )
    return (
        '<section>\n<h2>Every head</h2>\n<p class="soft">A row is a layer, a column a head. Bubble left: attention '
        "spread over all keys. Bubble right: all on one key. In the middle: level. Trained models have sharp and "
        f"saturated heads on purpose; this is a description, not a verdict.</p>\n{figures}</section>\n"
    )


def _anchors(run: Run) -> dict[str, str]:
    return {record.module: f"m{i}" for i, record in enumerate(run.latest)}


# ---- findings and scales ----------------------------------------------------


def _findings(findings: Sequence[Finding]) -> str:
    shown = (
        "".join(html_parts.finding(group, every_place=True) for group in groups(findings)) or "<p>No findings.</p>\n"
    )
    return f"<section>\n<h2>Findings</h2>\n{shown}</section>\n"


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
    return f"<section>\n<h2>{escape(title.rstrip(':'))}</h2>\n{html_parts.items(rest)}</section>\n"


# ---- numbers ----------------------------------------------------------------


def _tables(run: Run) -> str:
    anchors = _anchors(run)
    heads = sum(len(record.tally) for record in run.latest)
    unfolded = " open" if heads <= _OPEN else ""
    tables = "".join(
        f"<details{unfolded}><summary>{escape(module_title(record.module))}</summary>"
        f'<p class="soft"><small>{escape(view.facts(record))}</small></p>'
        f'<div class="scroll">{html_parts.table(record, anchors[record.module])}</div></details>\n'
        for record in run.latest
    )
    return f"<section>\n<h2>Every number</h2>\n{tables}</section>\n" if tables else ""


def _coverage(run: Run) -> str:
    lines = (*view.coverage(run), *run.notes, *view.cost(run))
    if not lines:
        return ""
    return f"<section>\n<h2>What was seen, and what it cost</h2>\n{html_parts.items(lines)}</section>\n"


def _footer(run: Run) -> str:
    return (
        "<footer>H/ln n: entropy of the weights over the logarithm of the visible keys, 1 is "
        "uniform. top-1: mean largest weight. at b,q,k: batch row, query and key of the largest "
        "logit. saturated: rows whose top-1 is 0.99 or more. gradient left: mean of 1 − Σp², what "
        f"the softmax lets through. Made by levelhead {escape(run.version)}.</footer>\n"
    )
