"""`Finding`, and the list of them that prints as a report.

What a finding is, how findings are grouped and what is printed of them, on every medium. When there is one is decided
in `symptoms`, `wrong_scale` and `logit_growth`, what the verdict says in `verdict`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from levelhead import documentation, front_ends
from levelhead.words import plural

Severity: TypeAlias = Literal["note", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("note", "warning", "error")  # from the mildest on

MARKS: Mapping[str, str] = {"error": "✖", "warning": "▲", "note": "·"}

SHOWN = 8  # places listed of one group of findings


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
    link: str  # where to read: a heading of docs/, which `levelhead docs` prints, or an address

    @property
    def where(self) -> str:
        """The module and its heads in words."""
        name = f"(the model){self.module}" if self.module[:1] in ("", " ") else self.module
        if isinstance(self.head, tuple):
            return f"{name} heads {_ranges(self.head)}"
        return name if self.head is None else f"{name} head {self.head}"

    @property
    def numbers(self) -> str:
        """The evidence in words."""
        rest = dict(self.evidence)
        least, about = (BOUNDED, ESTIMATED) if SAMPLED in rest else ((), ())
        words = [f"{number(rest.pop('heads'))} of {number(rest.pop('of'))} heads"] if "of" in rest else []
        bound = {x: "at least " if x in least else "about " if x in about else "" for x in rest}
        words += [f"{_WORDS.get(x, x.replace('_', ' '))} {bound[x]}{number(y)}" for x, y in rest.items()]
        return ", ".join(words)

    def __str__(self) -> str:
        return f"{self.severity}: {self.kind}: {self.where} ({self.numbers}). {self.why}"

    def _repr_html_(self) -> str:
        shown: str = front_ends.serving("notebook", "html").finding(self)
        return shown


@dataclass(frozen=True)
class Verdict:
    """One sentence, and the limits of it."""

    sentence: str
    not_judged: tuple[str, ...] = ()  # what was not looked at, and why; each a line

    def __str__(self) -> str:
        return self.sentence

    def lines(self) -> Iterator[str]:
        """The sentence, then what was not judged."""
        yield self.sentence
        yield from (f"not judged: {line}" for line in self.not_judged)


class Findings(list[Finding]):
    """Findings, the gravest first; prints as a report, and is an ordinary list otherwise."""

    def __init__(self, findings: Iterable[Finding] = (), about: str = "", verdict: Verdict | None = None) -> None:
        super().__init__(sorted(findings, key=_gravity))
        self.about = about  # what was looked at
        self.verdict = verdict  # what to think of it, and what was not judged

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
        explained = (line for group in groups(self) for line in (group.title, *group.lines()))
        return "\n".join([self.title, *explained, *self.verdict_lines()])

    __str__ = __repr__

    def _repr_html_(self) -> str:
        shown: str = front_ends.serving("notebook", "html").findings(self)
        return shown

    def verdict_lines(self) -> Iterator[str]:
        """The verdict and what was not judged; none for findings of no run."""
        if self.verdict is not None:
            first, *rest = self.verdict.lines()
            yield f"verdict: {first}"
            yield from rest

    @property
    def title(self) -> str:
        """What was looked at, and how many findings of each severity there are."""
        return f"{self.about}: {counted(self)}" if self.about else counted(self)


@dataclass(frozen=True)
class Group:
    """Findings of one kind and severity, with the same reason and advice."""

    severity: Severity
    kind: str
    why: str
    advice: str
    link: str
    places: tuple[str, ...]  # each with its numbers

    @property
    def title(self) -> str:
        """Severity, kind, and the number of places if there are several."""
        number = f" ({len(self.places)} places)" if len(self.places) > 1 else ""
        return f"{MARKS[self.severity]} {self.severity}: {self.kind}{number}"

    def lines(self) -> Iterator[str]:
        """Where with which numbers, why it matters, what to try, where to read."""
        yield from (f"  {place}" for place in self.places[:SHOWN])
        if (rest := len(self.places) - SHOWN) > 0:
            yield f"  … and {rest} more"
        yield f"  why: {self.why}"
        yield f"  try: {self.advice}"
        if self.link:
            yield f"  read: {documentation.where(self.link)}"


def groups(findings: Iterable[Finding]) -> list[Group]:
    """The findings in groups, the gravest first."""
    alike: dict[tuple[Severity, str, str, str, str], list[str]] = {}
    for f in sorted(findings, key=lambda f: -SEVERITIES.index(f.severity)):
        alike.setdefault((f.severity, f.kind, f.why, f.advice, f.link), []).append(f"{f.where}: {f.numbers}")
    return [Group(*topic, tuple(places)) for topic, places in alike.items()]


def counted(findings: Iterable[Finding]) -> str:
    """The number of findings of each severity."""
    n = Counter(finding.severity for finding in findings)
    return ", ".join(plural(n[severity], severity) for severity in reversed(SEVERITIES) if n[severity]) or "no findings"


def link(kind: str) -> str:
    """Where a kind is explained."""
    return documentation.link("health", kind)


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


SAMPLED = "sampled_rows"  # evidence that came from some rows only, and how many of a head:
BOUNDED = ("max_logit", "before_scale", "rows")  # then there may be more of these,
ESTIMATED = ("empty_rows",)  # and these are of all rows, by those that were measured

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
