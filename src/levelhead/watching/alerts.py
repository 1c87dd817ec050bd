"""`on_finding`: tells of a warning or an error right after the step that shows it.

A finding is reported once; again only if it gets graver, or reaches further heads. The newest snapshots go through the
same rules as in `diagnose`. The curves that growth is judged by are kept and extended, so that the cost of a step does
not grow with the run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from levelhead import checks
from levelhead.diagnosis import diagnose, logit_growth, thresholds
from levelhead.diagnosis.findings import SEVERITIES, Finding
from levelhead.errors import FindingError, bad_type, bad_value
from levelhead.runs import sessions
from levelhead.runs.record import Run, Snapshot
from levelhead.watching.attempts import Attempts

Listener: TypeAlias = Callable[[Finding], Any]


def _warn(finding: Finding) -> None:
    rank = sessions.rank()
    warnings.warn(f"levelhead{'' if rank is None else f' on rank {rank}'}: {finding}", stacklevel=2)


def _raise(finding: Finding) -> None:
    raise FindingError(finding)


_WORDS: dict[str, Listener] = {"warn": _warn, "raise": _raise}


def checked(on_finding: Any) -> list[Listener]:
    """What is to be done with a finding: functions of it."""
    if on_finding is None:
        return []
    listed = [on_finding] if isinstance(on_finding, str) or callable(on_finding) else on_finding
    if not isinstance(listed, Iterable):
        raise bad_type("on_finding", _WANTED, checks.short_repr(on_finding), "Pass a function of a finding")
    return [_one(each) for each in listed]


def of_rank(tell: Sequence[Listener], first: bool) -> list[Listener]:
    """What a rank does: all of it, but where ranks judge the same steps one warning is enough."""
    return [one for one in tell if first or one is not _warn]


_WANTED = 'a callable, "warn" or "raise", or a list of these'


def _one(each: Any) -> Listener:
    if isinstance(each, str):
        if each not in _WORDS:
            advice = 'In hf_callback there are also "save" and "stop"'
            raise bad_value("on_finding", _WANTED, repr(each), advice)
        return _WORDS[each]
    if not callable(each):
        raise bad_type("on_finding", _WANTED, checks.short_repr(each), "Pass a function of a finding")
    listener: Listener = each
    return listener


class Alerts:
    """Takes every snapshot, and calls the functions with what is new in it."""

    def __init__(self, tell: Sequence[Listener], expected_scale: float | str | None, history: int) -> None:
        self._tell, self._expected, self._history = tell, expected_scale, history
        self._newest: list[Snapshot] = []
        self._points: logit_growth.Points = {}
        self._gravity: dict[tuple[str, str, int | None], int] = {}

    def __call__(self, snapshot: Snapshot) -> None:
        """Judges a new step."""
        if not self._tell:
            return
        self._add(snapshot)
        findings = list(self._new())
        with Attempts() as attempt:  # a finding is reported once: also to functions after one that raises
            for tell in self._tell:
                for finding in findings[:1] if tell is _raise else findings:
                    attempt(tell, finding)

    def resume(self, snapshots: Sequence[Snapshot]) -> None:
        """Begins with these steps; what they show was reported when they were new."""
        self.__init__(self._tell, self._expected, self._history)  # type: ignore[misc]
        if self._tell:
            for snapshot in snapshots:
                self._add(snapshot)
            list(self._new())

    def _add(self, snapshot: Snapshot) -> None:
        self._newest = [*self._newest, snapshot][-thresholds.STEADY :]
        logit_growth.extend(self._points, snapshot)
        for points in self._points.values():
            if len(points) > self._history:  # as a watch thins its snapshots
                points[:] = [*points[:-1:2], points[-1]]

    def _new(self) -> Iterator[Finding]:
        if not self._newest:
            return
        run = Run("", tuple(self._newest))
        findings = [
            *diagnose.of_the_moment(run, self._expected),
            *logit_growth.judged(logit_growth.curves_of(self._points)),
        ]
        for finding in sorted(diagnose.bounded(findings, run), key=lambda finding: -SEVERITIES.index(finding.severity)):
            gravity = SEVERITIES.index(finding.severity)
            heads = finding.head if isinstance(finding.head, tuple) else (finding.head,)
            places = [(finding.kind, finding.module, head) for head in heads]
            if gravity and any(self._gravity.get(place, 0) < gravity for place in places):
                yield finding
            for place in places:
                self._gravity[place] = max(gravity, self._gravity.get(place, 0))
