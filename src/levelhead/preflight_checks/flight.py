"""A pre-flight on its way: the model, its batch, the pass that all others are compared with, and what was judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from levelhead.diagnosis.findings import Finding
from levelhead.preflight_checks.inputs import Batch, Key
from levelhead.preflight_checks.passes import Tape
from levelhead.preflight_checks.places import Grid
from levelhead.preflight_checks.result import Check


@dataclass
class Flight:
    """The model, its batch, and one pass of it that all others are compared with."""

    batch: Batch
    tape: Tape
    checks: list[Check] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def model(self) -> nn.Module:
        return self.batch.model

    def grid(self, key: Key) -> Grid:
        return Grid(*self.batch.sizes(key))

    def attempt(self, name: str, check: Callable[[], Any]) -> None:
        """Runs a check. One that a model does not stand, or that meets what it does not know, ends no pre-flight."""
        try:
            check()
        except Exception as error:
            self.unknown(name, "its input or values", f"a changed pass failed: {type(error).__name__}: {error}"[:300])

    def passed(self, name: str, changed: str, what: str) -> None:
        self.checks.append(Check(name, "passed", changed, what))

    def unknown(self, name: str, changed: str, why: str) -> None:
        self.checks.append(Check(name, "not judged", changed, why))

    def failed(self, name: str, changed: str, what: str, *found: Finding) -> None:
        self.checks.append(Check(name, "failed", changed, what, found[0].module if found else None))
        self.findings.extend(found)
