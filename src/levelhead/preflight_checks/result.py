"""What a pre-flight returns: checks with verdicts, and findings. It prints as a report. Nothing is judged here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from levelhead import documentation
from levelhead.diagnosis.findings import Finding, Findings, Severity, counted, groups

Verdict: TypeAlias = Literal["passed", "failed", "not judged"]
MARKS: Mapping[str, str] = {"passed": "✓", "failed": "✖", "not judged": "?"}
MAY_SEE_LATER = "causal=False says that tokens may see later ones"


@dataclass(frozen=True)
class Check:
    """One check: what it changed, what moved, and what follows."""

    name: str
    verdict: Verdict
    changed: str  # what it changed, or looked at
    moved: str  # what moved by how much, or why nothing was judged
    module: str | None = None  # where the first wrong module is; None: nowhere

    def __str__(self) -> str:
        where = "" if self.module is None else f"; first wrong module: {self.module or '(the model)'}"
        return f"{MARKS[self.verdict]} {self.name}: {self.verdict}. {self.changed}: {self.moved}{where}"


@dataclass(frozen=True)
class Preflight:
    """The result of `lh.preflight`."""

    model: str
    checks: tuple[Check, ...]
    findings: Findings = field(default_factory=Findings)

    @property
    def passed(self) -> bool:
        """Whether no finding is a warning or an error."""
        return all(finding.severity == "note" for finding in self.findings)

    def __getitem__(self, name: str) -> Check:
        for check in self.checks:
            if check.name == name:
                return check
        raise KeyError(f"no check {name!r}; there are {', '.join(repr(check.name) for check in self.checks)}")

    def lines(self) -> Iterator[str]:
        """The report."""
        wrong = [finding for finding in self.findings if finding.severity != "note"]
        yield f"Pre-flight of {self.model}: {counted(wrong)}{self._unjudged()}"
        yield from (f"  {check}" for check in self.checks)
        for group in groups(wrong):
            yield group.title
            yield from group.lines()

    def _unjudged(self) -> str:
        """What a first line must not leave out: that causality was not judged."""
        open_ = [c for c in self.checks if c.name == "causality" and c.verdict == "not judged"]
        if not open_ or MAY_SEE_LATER in open_[0].moved:
            return ""
        advice = "pass causal=True or causal=False" if "causal=True" in open_[0].moved else open_[0].moved
        return f"; not judged: causality ({advice})"

    def to_json(self) -> dict[str, Any]:
        """As what `json` can write."""
        checks = [{name: getattr(check, name) for name in Check.__dataclass_fields__} for check in self.checks]
        return {"model": self.model, "checks": checks, "findings": self.findings.to_json()}

    def __str__(self) -> str:
        return "\n".join(self.lines())

    __repr__ = __str__


def finding(
    kind: str,
    severity: Severity,
    module: str,
    why: str,
    advice: str,
    head: int | tuple[int, ...] | None = None,
    **evidence: float,
) -> Finding:
    """A finding of a check; its kind is a section of the page."""
    return Finding(kind, severity, module, head, evidence, why, advice, documentation.link("preflight", kind))
