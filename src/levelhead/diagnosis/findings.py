"""`Finding`, and the list of them that prints as a report.

What a finding is and how it reads; not when there is one (`symptoms`, `scale`, `growth`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from itertools import groupby
from typing import Any, Literal, TypeAlias

Severity: TypeAlias = Literal["note", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("note", "warning", "error")  # from the mildest on

PAGE = "docs/health.md"
_SHOWN = 8  # modules listed under one heading


@dataclass(frozen=True)
class Finding:
    """One thing worth knowing about a module, or about some of its heads."""

    kind: str
    severity: Severity
    module: str  # full name within the model; "" is the model itself
    head: int | tuple[int, ...] | None  # one head, several, or the module as a whole
    evidence: Mapping[str, float]  # the numbers; where several heads share it, of the worst
    why: str  # why it matters
    advice: str  # what to try
    link: str  # where to read

    @property
    def where(self) -> str:
        """The module and its heads in words."""
        name = self.module or "(the model)"
        if self.head is None:
            return name
        if isinstance(self.head, int):
            return f"{name} head {self.head}"
        return f"{name} heads {_ranges(self.head)}"

    @property
    def numbers(self) -> str:
        """The evidence in words."""
        return ", ".join(f"{_words(name)} {number(x)}" for name, x in self.evidence.items())

    def __str__(self) -> str:
        return f"{self.severity}: {self.kind}: {self.where} ({self.numbers}). {self.why}"


class Findings(list[Finding]):
    """Findings, the gravest first; prints as a report, and is an ordinary list otherwise."""

    def __init__(self, findings: Iterable[Finding] = (), about: str = "") -> None:
        super().__init__(sorted(findings, key=_gravity))
        self.about = about  # what was looked at

    @property
    def worst(self) -> Severity | None:
        """The gravest severity; None: there is no finding."""
        return self[0].severity if self else None

    def of(self, kind: str, severity: Severity | None = None) -> list[Finding]:
        """Those of a kind, and of a severity if given."""
        return [f for f in self if f.kind == kind and severity in (None, f.severity)]

    def to_json(self) -> list[dict[str, Any]]:
        """As what `json` can write."""
        return [asdict(finding) for finding in self]

    def __repr__(self) -> str:
        return "\n".join([self._title(), *(line for topic in self._topics() for line in topic)])

    __str__ = __repr__

    def _repr_html_(self) -> str:
        topics = "".join(
            f"<p><b>{escape(head)}</b><br>{'<br>'.join(map(escape, lines))}</p>" for head, *lines in self._topics()
        )
        return f"<p>{escape(self._title())}</p>{topics}"

    def _title(self) -> str:
        counts = {s: sum(f.severity == s for f in self) for s in reversed(SEVERITIES)}
        found = ", ".join(f"{n} {s}{'s' * (n != 1)}" for s, n in counts.items() if n)
        return f"{self.about}: {found or 'no findings'}" if self.about else found or "no findings"

    def _topics(self) -> Iterator[list[str]]:
        """A heading and its lines for findings that read the same: where, then why and what."""
        for (severity, kind, why, advice, link), same in groupby(self, _topic):
            found = list(same)
            rest = len(found) - _SHOWN
            yield [
                f"{severity.upper()}: {kind}",
                *(f"  {finding.where}: {finding.numbers}" for finding in found[:_SHOWN]),
                *([f"  … and {rest} more modules"] if rest > 0 else []),
                f"  why: {why}",
                f"  try: {advice}",
                f"  read: {link}",
            ]


def link(kind: str) -> str:
    """Where a kind is explained."""
    return f"{PAGE}#{kind.lower().replace(' ', '-')}"


def worst_heads(heads: Sequence[int]) -> int | tuple[int, ...]:
    """What `Finding.head` holds for these heads."""
    return heads[0] if len(heads) == 1 else tuple(heads)


def number(x: float) -> str:
    """Short, and honest about size: 0.125, 43.9, 1,024, 3.2e-07."""
    if not math.isfinite(x):
        return str(x)
    if x == int(x) and abs(x) < 1e7:
        return f"{int(x):,}"
    if 1e-3 <= abs(x) < 1e7:
        digits = max(0, 2 - math.floor(math.log10(abs(x))))
        return f"{x:,.{digits}f}"
    return f"{x:.2g}"


_WORDS = {
    "d_k": "d_k",
    "right_scale": "1/√d_k",
    "max_logit": "largest |logit|",
    "before_scale": "before the scale",
    "normalised_entropy": "H/ln n",
    "growth_per_1000_steps": "growth per 1,000 steps",
    "step_at_1e3": "at this pace 1e3 at step",
    "step_at_1e4": "1e4 at step",
    "mean_max": "mean row maximum",
    "dq_norm": "|dL/dq|",
    "dk_norm": "|dL/dk|",
    "dv_norm": "|dL/dv|",
}


def _words(name: str) -> str:
    return _WORDS.get(name, name.replace("_", " "))


def _topic(f: Finding) -> tuple[Severity, str, str, str, str]:
    return f.severity, f.kind, f.why, f.advice, f.link


def _gravity(f: Finding) -> tuple[int, str, str, str]:
    return -SEVERITIES.index(f.severity), f.kind, f.why, f.advice


def _ranges(heads: tuple[int, ...]) -> str:
    """0-3, 7, 9-11."""
    runs: list[list[int]] = []
    for head in heads:
        if runs and head == runs[-1][-1] + 1:
            runs[-1].append(head)
        else:
            runs.append([head])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
