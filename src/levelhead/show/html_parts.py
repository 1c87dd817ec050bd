"""What a page and a notebook show alike of a run: verdict, findings, the numbers of a module's heads.

Every string from a model or a file is escaped here. Looks are in `parts.css`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

from levelhead import documentation
from levelhead.diagnosis.findings import SHOWN, Finding, Group
from levelhead.runs.record import Record
from levelhead.show import gauge_svg, view


def verdict(findings: Sequence[Finding]) -> str:
    """What to think of it, and what was not judged; nothing for findings that come without one."""
    said = getattr(findings, "verdict", None)
    if said is None:
        return ""
    worst = getattr(findings, "worst", None) or "note"
    limits = f"<details><summary>not judged</summary>{items(said.not_judged)}</details>\n" if said.not_judged else ""
    return f'<p class="verdict {escape(worst)}">{escape(said.sentence[:1].upper() + said.sentence[1:])}.</p>\n{limits}'


def finding(group: Group, *, every_place: bool) -> str:
    """Findings that have the same reason; places beyond the first few are folded, or counted only."""
    shown, rest = group.places[:SHOWN], group.places[SHOWN:]
    listed = items(shown if every_place or not rest else [*shown, f"… and {len(rest)} more"])
    if every_place and rest:
        listed += f"<details><summary>{len(rest)} more</summary>{items(rest)}</details>"
    return (
        f'<article class="finding {escape(group.severity)}"><h3>'
        f'<span class="severity">{escape(group.severity)}</span>{escape(group.kind)}</h3>{listed}'
        f"<dl><dt>why</dt><dd>{escape(group.why)}</dd><dt>try</dt><dd>{escape(group.advice)}</dd>"
        f"{_link(group.link)}</dl></article>\n"
    )


def _link(link: str) -> str:
    """Where to read; only an address of the web, or of a site on this disk, can be clicked."""
    if not link:
        return ""
    place = documentation.where(link)
    shown = escape(place)
    if place.startswith(("https://", "http://")) or (place != link and place.startswith("file://")):
        shown = f'<a href="{shown}" rel="noopener noreferrer">{shown}</a>'
    return f"<dt>read</dt><dd>{shown}</dd>"


def table(record: Record, anchor: str = "", most: int | None = None) -> str:
    """A line per head; with an anchor each line has an address; `most` heads at most."""
    columns = view.columns(record)
    titles = "".join(f'<th scope="col"{word(title)}>{escape(title)}</th>' for title in columns)
    ids = [f' id="{anchor}h{h}"' if anchor else "" for h in range(len(record.tally))]
    rows = "".join(f"<tr{id}>{''.join(_cells(columns, record, h))}</tr>\n" for h, id in enumerate(ids[:most]))
    return f"<table><thead><tr>{titles}</tr></thead>\n<tbody>{rows}</tbody></table>"


def _cells(columns: Mapping[str, Sequence[str]], record: Record, head: int) -> Iterator[str]:
    for title, cells in columns.items():
        if title == "head":
            yield f'<th scope="row">{head}</th>'
        elif title == "gauge":
            level = record.heads.levels[head]
            yield f"<td>{gauge_svg.picture(level, float(record.heads.normalised_entropy[head]))}</td>"
        else:
            yield f"<td{word(title)}>{escape(cells[head])}</td>"


def word(title: str) -> str:
    """The class of a column that holds words."""
    return ' class="word"' if title in ("gauge", "level") else ""


def items(lines: Iterable[str]) -> str:
    """A list of plain text."""
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>\n"
