"""A figure and a claim's result in a notebook: charts, numbers beside their theory, gauges; the code folded.

`Figure.__str__` prints the same without pictures. Every string is escaped here; the look is that of `show.notebook`.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any, TypeAlias

from levelhead.lab import notebook_svg
from levelhead.show import gauge_svg
from levelhead.show.notebook import fragment

# Those of `lab.figure`, which imports this module.
Figure: TypeAlias = Any
Fact: TypeAlias = Any
Gauge: TypeAlias = Any


def figure(shown: Figure) -> str:
    """Title, charts, numbers, the sentence that says what to see."""
    claims = "".join(_badge(f"{claim['id']} {claim['verdict']}", claim["verdict"]) for claim in shown.claims)
    title = f"<p><b>{escape(shown.title)}</b> {claims}</p>"
    note = f"<p>{escape(shown.note)}</p>" if shown.note else ""
    return fragment(title + _drawn(shown) + note + _closing(shown))


def result(shown: Figure, verdict: str, expected: str, criterion: str) -> str:
    """The figure of a claim, under its verdict."""
    compared = "" if verdict == expected else f", expected {expected}"
    title = f"<p>{_badge(f'{shown.id}: {verdict}{compared}', verdict)} <b>{escape(shown.title)}</b></p>"
    judged = f'<p class="soft">Criterion: {escape(criterion)}</p>'
    settings = ", ".join(f"{name} {_short(value)}" for name, value in shown.extra["params"].items())
    made = f'<p class="soft">{escape(settings)}, seed {shown.extra["seed"]}</p>' if settings else ""
    return fragment(title + _drawn(shown) + judged + made + _closing(shown))


def _drawn(shown: Figure) -> str:
    charts = "".join(notebook_svg.svg(chart) for chart in shown.json()["charts"])
    pictures = f'<div class="charts">{charts}</div>' if charts else ""
    return pictures + _table(shown) + "".join(map(_gauge, shown.gauges))


def _table(shown: Figure) -> str:
    """A line per label, a column per source: what was measured stands beside its theory."""
    lines: dict[str, dict[str, Fact]] = {}
    for fact in shown.facts:
        lines.setdefault(fact.label, {})[fact.source] = fact
    sources = [name for name in ("live", "recorded", "theory") if any(name in line for line in lines.values())]
    if not lines:
        return ""
    head = "".join(f'<th scope="col" class="word">{_SOURCES[name]}</th>' for name in sources)
    rows = "".join(
        f'<tr><th scope="row" class="word">{escape(label)}</th>'
        f"{''.join(_cell(line.get(name)) for name in sources)}</tr>"
        for label, line in lines.items()
    )
    return f'<div class="scroll"><table><thead><tr><td></td>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


_SOURCES: Mapping[str, str] = {"live": "measured", "recorded": "recorded", "theory": "theory"}


def _cell(fact: Fact | None) -> str:
    if fact is None:
        return "<td></td>"
    formula = f' <span class="soft">{escape(fact.formula)}</span>' if fact.formula else ""
    return f'<td class="word">{escape(fact.text())}{formula}</td>'


def _gauge(gauge: Gauge) -> str:
    drawn = gauge_svg.picture(gauge.level, gauge.normalised_entropy)
    words = f"{gauge.level}, H/ln n {gauge.normalised_entropy:.3f} ({gauge.source})"
    return f'<div class="gauge">{drawn}<b>{escape(gauge.label)}</b><span>{escape(words)}</span></div>'


def _closing(shown: Figure) -> str:
    recorded = f'<p class="soft">{escape(shown.recorded)}</p>' if shown.recorded else ""
    code = f"<details><summary>code</summary><pre>{escape(shown.python)}</pre></details>" if shown.python else ""
    return recorded + code


def _badge(words: str, verdict: str) -> str:
    return f'<span class="badge {escape(verdict)}">{escape(words)}</span>'


def _short(value: Any) -> str:
    """A parameter; a long list by its ends."""
    if isinstance(value, list) and len(value) > 6:
        return f"{value[0]} … {value[-1]}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
