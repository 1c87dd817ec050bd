"""What a watch remembers: snapshots, numbers that were logged beside them, and what a file held before a restart.

Memory is bounded: beyond a limit every second entry is dropped, so trends stay. A resumed history is thinned as it
would have been without the interruption, so the same alarms follow at the same steps.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeAlias

from levelhead import checks
from levelhead.errors import bad_type
from levelhead.runs import files
from levelhead.runs.record import Snapshot
from levelhead.watching.alerts import Alerts

KEPT_NUMBERS = 8192  # of one curve that is logged

Logged: TypeAlias = dict[str, list[tuple[int, float]]]  # by name: steps and numbers


class History:
    """Kept by a watch; `alerts` judge what is resumed."""

    def __init__(self, limit: int, alerts: Alerts) -> None:
        self.limit, self.alerts = limit, alerts
        self.snapshots: list[Snapshot] = []
        self.logged: Logged = {}
        self.notes: tuple[str, ...] = ()
        self.first = 0  # the first step that is not from a file

    @property
    def resumed(self) -> int:
        """How many steps are from a file."""
        return sum(snapshot.step < self.first for snapshot in self.snapshots)

    def keep(self, snapshot: Snapshot) -> None:
        """Adds a step."""
        self.snapshots.append(snapshot)
        if len(self.snapshots) > self.limit:
            self.snapshots = [*self.snapshots[:-1:2], self.snapshots[-1]]

    def take_passes(self, first: int) -> list[Snapshot]:
        """Removes what was recorded from this step on, and returns it."""
        passes = [snapshot for snapshot in self.snapshots if snapshot.step >= first]
        self.snapshots = [snapshot for snapshot in self.snapshots if snapshot.step < first]
        return passes

    def log(self, step: int, numbers: Mapping[str, Any]) -> dict[str, float]:
        """Adds numbers of a step; what they are as floats."""
        values = {name: _float(name, x) for name, x in numbers.items()}
        for name, value in values.items():
            curve = self.logged.setdefault(name, [])
            curve.append((step, value))
            if len(curve) > KEPT_NUMBERS:
                curve[:] = [*curve[:-1:2], curve[-1]]
        return values

    def start_at(self, step: int) -> None:
        """Forgets resumed steps from this one on: they are about to run again."""
        if step < self.first:
            self.first = step
            self.take_passes(step)
            self.logged = {name: [point for point in curve if point[0] < step] for name, curve in self.logged.items()}
            self.alerts.resume(self.snapshots)

    def resume(self, path: str | os.PathLike[str]) -> None:
        """Continues what a sink or `save` wrote; a file that is not there yet is a beginning, and noted as one."""
        if not os.path.exists(path):
            self.notes = (f"resume: {os.fspath(path)} was not there, so the history begins here",)
            return
        run = files.read(path)
        for snapshot in run.snapshots:
            self.keep(snapshot)
        self.logged = {name: list(curve) for name, curve in run.logged.items()}
        if run.snapshots:
            self.first = run.last.step + 1
            self.notes = (f"resumed after step {run.last.step} from {os.fspath(path)}",)
            self.alerts.resume(self.snapshots)


def step_number(step: Any) -> int:
    """The number of a step, checked."""
    advice = "Pass the number of optimiser steps so far, such as trainer.global_step"
    what = "an integer from 0 on"
    return checks.integer("step", step, what, advice, lambda n: 0 <= n < 2**63)


def _float(name: str, x: Any) -> float:
    try:
        return float(x)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise bad_type(name, "a number", checks.short_repr(x), "Pass one number, such as loss.item()") from error
