"""The report of a head as one HTML file, and smaller for notebooks.

Self-contained: its style is inlined, its pictures are inline SVG, it has no script and makes no network request. Every
string from a sentence or a model is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

import numpy as np

from levelhead._version import __version__
from levelhead.explanation import svg
from levelhead.explanation.head_report import HeadReport
from levelhead.explanation.head_steps import Array, Gauge, Step, in_brackets
from levelhead.explanation.token_attention import Look, TokenAttention
from levelhead.explanation.tokens import quoted
from levelhead.show import gauge_svg
from levelhead.show.html import document
from levelhead.show.notebook import fragment

_OUTPUT = 8  # columns of an output that are shown
_BESIDE = 7  # columns up to which two tables fit side by side
_OPEN = 12  # heads that are shown unfolded


def html(report: HeadReport) -> str:
    """The whole page."""
    notes = "".join(f'<p class="soft">{escape(note)}</p>\n' for note in report.notes)
    body = (
        f'<header>\n<div class="brand">{gauge_svg.picture("level")}levelhead explain</div>\n'
        f"<h1>{escape(report.title)}</h1>\n<p>{escape(report.about)}.</p>\n{notes}</header>\n"
        f"<section>\n<h2>The block</h2>\n{_block(report)}\n</section>\n{_steps(report)}"
        f"<section>\n<h2>With the scale and without</h2>\n{_pair(report)}{_bars(report)}</section>\n"
        f"{_heads(report.attended)}{_FOOTER}"
    )
    return document(report.title, svg.look(), body)


def notebook(report: HeadReport) -> str:
    """Block, weights and gauges, for `_repr_html_`, in the notebook's own colours."""
    notes = "".join(f'<p class="soft">{escape(note)}</p>' for note in report.notes)
    shown = f"<p><b>{escape(report.title)}</b>: {escape(report.about)}</p>{notes}{_block(report)}{_pair(report)}"
    return fragment(shown, svg.own_look())


def _block(report: HeadReport) -> str:
    return f'<figure class="drawn block">{svg.block(report.head)}</figure>'


# ---- the steps --------------------------------------------------------------


def _steps(report: HeadReport) -> str:
    tables = "".join(_step(report, step) for step in report.head.steps)
    wide = " wide" if len(report.head.keys) > _BESIDE else ""
    part = svg.extract(report)
    left_out = f" {part} The JSON has all." if part else ""
    return (
        f"<section>\n<h2>Step by step</h2>\n<table>{_lines(report.inputs)}</table>\n"
        f'<p class="soft">A score is coloured by the weight it becomes.{left_out}</p>\n'
        f'<div class="pair{wide}">\n{tables}</div>\n<table>{_lines(report.after)}</table>\n</section>\n'
    )


def _lines(steps: Iterable[Step]) -> str:
    return "".join(
        f'<tr><th class="word">{escape(step.name)}</th><td class="word">'
        f'{in_brackets(step.shape)}</td><td class="word about">{escape(step.about)}</td></tr>\n'
        for step in steps
    )


def _step(report: HeadReport, step: Step) -> str:
    head, name = report.head, step.name
    if name == "weighted sum":
        inside = f"<p>{escape(report.sum_in_words(8))}</p>"
    elif name == "output":
        values = head.output[:, :_OUTPUT]
        columns = range(values.shape[1])
        inside = _table(report, values, tuple(f"[{j}]" for j in columns), np.zeros(values.shape), columns, 3)
    else:
        values, weights = head.table(name)
        inside = _table(report, values, head.keys, weights, svg.shown(report)[1], 3 if name == "weights" else 2)
    return (
        f"<figure><h3>{step.number}{escape(name)} <code>{in_brackets(step.shape)}</code></h3>"
        f'<figcaption>{escape(step.about)}</figcaption><div class="scroll">{inside}</div></figure>\n'
    )


def _table(
    report: HeadReport, values: Array, names: tuple[str, ...], weights: Array, columns: range, digits: int
) -> str:
    chosen = ' class="chosen"'
    titles = "".join(f'<th scope="col">{escape(names[j])}</th>' for j in columns)
    rows = "".join(
        f'<tr{chosen if i == report.token else ""}><th scope="row">{escape(report.head.queries[i])}</th>'
        f"{''.join(_cell(values[i, j], weights[i, j], digits) for j in columns)}</tr>\n"
        for i in svg.shown(report)[0]
    )
    return f'<table class="heats"><thead><tr><td></td>{titles}</tr></thead>\n<tbody>{rows}</tbody></table>'


def _cell(value: float, weight: float, digits: int) -> str:
    shown = "·" if value == -np.inf else f"{value:.{digits}f}"
    style = f' class="{svg.ink_on(float(weight))}" style="--w:{weight:.2f}"' if weight >= 0.005 else ""
    return f"<td{style}>{shown}</td>"


# ---- with and without the scale ---------------------------------------------


def _pair(report: HeadReport) -> str:
    figures = "".join(
        f"<figure><figcaption>weights, {escape(title)}</figcaption>"
        f'<div class="drawn">{svg.picture(weights, report, f"weights, {title}")}</div>{_gauge(gauge)}</figure>\n'
        for title, weights, gauge in report.head.sides
    )
    return f'<div class="pair">\n{figures}</div>\n'


def _gauge(gauge: Gauge) -> str:
    entropy = "–" if np.isnan(gauge.normalised_entropy) else f"{gauge.normalised_entropy:.2f}"
    return (
        f'<div class="gauge">{gauge_svg.picture(gauge.level, gauge.normalised_entropy)}'
        f"<b>{gauge.level}</b><span>H/ln n {entropy}, top-1 {gauge.top1:.2f}, "
        f"max logit {gauge.max_logit:.1f}</span></div>"
    )


def _bars(report: HeadReport) -> str:
    """The token's row, key by key."""
    if report.token is None:
        return ""
    head, row = report.head, report.row
    lines = "".join(
        f"<span>{escape(head.keys[j])}</span>"
        + "".join(f'<i style="--w:{x[row, j]:.3f}">{x[row, j]:.3f}</i>' for _, x, _ in head.sides)
        for j in svg.shown(report)[1]
        if head.logits[row, j] > -np.inf
    )
    return (
        f"<figure><h3>Where {escape(quoted(head.queries[row]))} looks in this head</h3>"
        f'<div class="bars3"><b></b><b>scores {escape(head.scale)}</b><b>unscaled</b>\n{lines}</div></figure>\n'
    )


# ---- every head -------------------------------------------------------------


def _heads(attended: TokenAttention | None) -> str:
    if attended is None:
        return ""
    sentences = "".join(f"<li>{escape(sentence)}</li>" for sentence in attended.sentences())
    rest = attended.looks[_OPEN:]
    more = f"<details><summary>{len(rest)} more heads</summary>{_looks(attended, rest)}</details>\n" if rest else ""
    return (
        f"<section>\n<h2>Where {escape(quoted(attended.name))} looks in every head</h2>\n"
        f"<ul>{sentences}</ul>\n<figure>{_looks(attended, attended.looks[:_OPEN])}</figure>\n{more}</section>\n"
    )


def _looks(attended: TokenAttention, looks: Iterable[Look]) -> str:
    names = ("layer", "head", "most weight on", "", "unscaled", "", "on another word", "")
    titles = "".join(f'<th class="word">{name}</th>' for name in names)
    rows = "".join(
        f"<tr><td>{look.layer}</td><td>{look.head}</td>{''.join(map(_attended, attended.cells(look)))}</tr>\n"
        for look in looks
    )
    head = f"<thead><tr>{titles}</tr></thead>"
    return f'<div class="scroll"><table>{head}<tbody>{rows}</tbody></table></div>'


def _attended(cell: tuple[str | None, float]) -> str:
    name, weight = cell
    return f'<td class="word">{escape(name or "–")}</td><td>{weight:.2f}</td>'


_FOOTER = (
    "<footer>H/ln n: entropy of the weights over the logarithm of the visible keys, 1 is "
    "uniform. top-1: mean largest weight. Layers and heads count from 0. "
    f"Made by levelhead {escape(__version__)}.</footer>\n"
)
