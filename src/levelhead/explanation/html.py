"""A head's story as one HTML file, and smaller for notebooks.

Self-contained: its style is inlined, its pictures are inline SVG, it has no script and asks the
network for nothing. Every string that comes from a sentence or a model is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import numpy as np

from levelhead._version import __version__
from levelhead.explanation import svg
from levelhead.explanation.head_report import HeadReport
from levelhead.explanation.head_steps import NUMBERED, Array, Gauge, Step, in_brackets
from levelhead.explanation.token_attention import TokenAttention
from levelhead.explanation.tokens import quoted
from levelhead.show import gauge_svg

__all__ = ["html", "notebook"]

_OUTPUT = 8  # columns of an output that are shown
_BESIDE = 7  # columns up to which two tables stand side by side
_OPEN = 12  # heads that are shown unfolded


def html(story: HeadReport) -> str:
    """The whole page."""
    body = "".join((_header(story), _steps(story), _beside(story), _heads(story), _footer()))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(story.title)} · levelhead</title>\n<style>\n{svg.look()}</style>\n"
        f'</head>\n<body class="lh page">\n<main>\n{body}</main>\n</body>\n</html>\n'
    )


def notebook(story: HeadReport) -> str:
    """Block, weights and gauges, for `_repr_html_`; it takes the notebook's own ink and paper."""
    notes = "".join(f'<p class="soft">{escape(note)}</p>' for note in story.notes)
    return (
        f'<div class="lh note"><style>\n{svg.look()}</style>'
        f"<p><b>{escape(story.title)}</b>: {escape(story.about)}</p>{notes}"
        f'<figure class="drawn block">{svg.block(story.head)}</figure>{_pair(story)}</div>'
    )


def _header(story: HeadReport) -> str:
    notes = "".join(f'<p class="soft">{escape(note)}</p>\n' for note in story.notes)
    return (
        f'<header>\n<div class="brand">{gauge_svg.picture("level")}levelhead explain</div>\n'
        f"<h1>{escape(story.title)}</h1>\n<p>{escape(story.about)}.</p>\n{notes}</header>\n"
    )


# ---- the steps --------------------------------------------------------------


def _steps(story: HeadReport) -> str:
    parts = "".join(map(_line, story.inputs))
    tables = "".join(_step(story, step) for step in story.head.steps)
    after = "".join(map(_line, story.after))
    wide = " wide" if len(story.head.keys) > _BESIDE else ""
    return (
        f"<section>\n<h2>The block</h2>\n"
        f'<figure class="drawn block">{svg.block(story.head)}</figure>\n</section>\n'
        f"<section>\n<h2>Step by step</h2>\n<table>{parts}</table>\n{_cut(story)}"
        f'<div class="pair{wide}">\n{tables}</div>\n<table>{after}</table>\n</section>\n'
    )


def _line(step: Step) -> str:
    return (
        f'<tr><th class="word">{escape(step.name)}</th><td class="word">'
        f'{in_brackets(step.shape)}</td><td class="word about">{escape(step.about)}</td></tr>\n'
    )


def _step(story: HeadReport, step: Step) -> str:
    head, name = story.head, step.name
    number = f"{NUMBERED.index(name) + 1}. " if name in NUMBERED else ""
    if name == "weighted sum":
        inside = f"<p>{escape(story.sum_in_words(8))}</p>"
    elif name == "output":
        values = head.output[:, :_OUTPUT]
        columns = tuple(f"[{j}]" for j in range(values.shape[1]))
        inside = _table(story, values, columns, np.zeros(values.shape), range(len(columns)), 3)
    else:
        weights = head.unscaled if name == "scores" else head.weights
        values, digits = head.values(name), 3 if name == "weights" else 2
        if name == "weights":  # a hidden key has none, which is not the same as a small one
            values = np.where(head.logits == -np.inf, -np.inf, values)
        inside = _table(story, values, head.keys, weights, svg.shown(head, story)[1], digits)
    return (
        f"<figure><h3>{number}{escape(name)} <code>{in_brackets(step.shape)}</code></h3>"
        f"<figcaption>{escape(step.about)}</figcaption>"
        f'<div class="scroll">{inside}</div></figure>\n'
    )


def _cut(story: HeadReport) -> str:
    said = "A score is coloured by the weight it becomes."
    if part := svg.extract(story):
        said += f" {part} The JSON has all."
    return f'<p class="soft">{said}</p>\n'


def _table(
    story: HeadReport, values: Array, names: tuple[str, ...], weights: Array, columns: range, digits: int
) -> str:
    titles = "".join(f'<th scope="col">{escape(names[j])}</th>' for j in columns)
    rows = "".join(
        f"<tr{_chosen(story, i)}>"
        f'<th scope="row">{escape(story.head.queries[i])}</th>'
        f"{''.join(_cell(values[i, j], weights[i, j], digits) for j in columns)}</tr>\n"
        for i in svg.shown(story.head, story)[0]
    )
    return f'<table class="heats"><thead><tr><td></td>{titles}</tr></thead>\n<tbody>{rows}</tbody></table>'


def _chosen(story: HeadReport, row: int) -> str:
    return ' class="chosen"' if row == story.token else ""


def _cell(value: float, weight: float, digits: int) -> str:
    shown = "·" if value == -np.inf else f"{value:.{digits}f}"
    if not weight >= 0.005:
        return f"<td>{shown}</td>"
    ink = svg.ink_on(float(weight))
    return f'<td class="{ink}" style="--w:{weight:.2f}">{shown}</td>'


# ---- with and without the scale ---------------------------------------------


def _beside(story: HeadReport) -> str:
    return f"<section>\n<h2>With the scale and without</h2>\n{_pair(story)}{_bars(story)}</section>\n"


def _pair(story: HeadReport) -> str:
    head = story.head
    sides = ((f"scores {head.scale}", head.weights, head.gauge), ("unscaled", head.unscaled, head.unscaled_gauge))
    figures = "".join(
        f"<figure><figcaption>weights, {escape(title)}</figcaption>"
        f'<div class="drawn">{svg.picture(values, story, f"weights, {title}")}</div>'
        f"{_gauge(gauge)}</figure>\n"
        for title, values, gauge in sides
    )
    return f'<div class="pair">\n{figures}</div>\n'


def _gauge(gauge: Gauge) -> str:
    entropy = "–" if np.isnan(gauge.normalised_entropy) else f"{gauge.normalised_entropy:.2f}"
    return (
        f'<div class="gauge">{gauge_svg.picture(gauge.level, gauge.normalised_entropy)}'
        f"<b>{gauge.level}</b><span>H/ln n {entropy}, top-1 {gauge.top1:.2f}, "
        f"max logit {gauge.max_logit:.1f}</span></div>"
    )


def _bars(story: HeadReport) -> str:
    """The token's row, key by key."""
    if story.token is None:
        return ""
    head, row = story.head, story.row
    lines = "".join(
        f"<span>{escape(head.keys[j])}</span>"
        + "".join(f'<i style="--w:{x[row, j]:.3f}">{x[row, j]:.3f}</i>' for x in (head.weights, head.unscaled))
        for j in svg.shown(head, story)[1]
        if head.logits[row, j] > -np.inf
    )
    return (
        f"<figure><h3>Where {escape(quoted(head.queries[row]))} looks in this head</h3>"
        f'<div class="bars3"><b></b><b>scores {escape(head.scale)}</b><b>unscaled</b>\n'
        f"{lines}</div></figure>\n"
    )


# ---- every head -------------------------------------------------------------


def _heads(story: HeadReport) -> str:
    found = story.attended
    if found is None:
        return ""
    said = "".join(f"<li>{escape(sentence)}</li>" for sentence in found.sentences())
    rows = list(_looks(found))
    rest = rows[_OPEN:]
    more = (
        f'<details><summary>{len(rest)} more heads</summary><div class="scroll"><table>'
        f"{_TITLES}<tbody>{''.join(rest)}</tbody></table></div></details>\n"
        if rest
        else ""
    )
    return (
        f"<section>\n<h2>Where {escape(quoted(found.name))} looks in every head</h2>\n"
        f"<ul>{said}</ul>\n"
        f'<figure><div class="scroll"><table>{_TITLES}<tbody>{"".join(rows[:_OPEN])}</tbody>'
        f"</table></div></figure>\n{more}</section>\n"
    )


_NAMES = ("layer", "head", "most weight on", "", "unscaled", "", "on another word", "")
_TITLES = "<thead><tr>" + "".join(f'<th class="word">{name}</th>' for name in _NAMES) + "</tr></thead>"


def _looks(found: TokenAttention) -> Iterator[str]:
    for look in found.looks:
        cells = [(found.named(look.to), look.weight)]
        cells.append((found.named(look.unscaled_to), look.unscaled_weight))
        cells.append(("–" if look.word is None else found.named(look.word), look.word_weight))
        shown = "".join(f'<td class="word">{escape(name)}</td><td>{weight:.2f}</td>' for name, weight in cells)
        yield f"<tr><td>{look.layer}</td><td>{look.head}</td>{shown}</tr>\n"


def _footer() -> str:
    return (
        "<footer>H/ln n: entropy of the weights over the logarithm of the visible keys, 1 is "
        "uniform. top-1: mean largest weight. Layers and heads count from 0. "
        f"Made by levelhead {escape(__version__)}.</footer>\n"
    )
