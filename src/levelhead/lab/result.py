"""The result of one claim: theory beside measurement, the verdict beside the expected one.

Every field holds JSON values, so a result read from a file equals one just measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from levelhead.json_numbers import json_value
from levelhead.lab import registry
from levelhead.lab.claim import VERDICTS, Outcome, Params, Task, Verdict
from levelhead.lab.claim_figure import claim_figure
from levelhead.lab.figure import Figure, Source, snippet

PRINTED = ("id", "claim", "theory", "measured", "stderr", "criterion", "expected", "verdict", "params", "seed")


@dataclass(frozen=True)
class Result:
    id: str
    claim: str
    theory: Any
    measured: Any
    stderr: Any  # of what was measured, in its shape; None where nothing is random
    criterion: str
    expected: Verdict
    verdict: Verdict
    params: Params
    seed: int
    details: Mapping[str, Any] = field(default_factory=dict)  # curves for `figure()`; not printed

    @property
    def as_expected(self) -> bool:
        """Whether the verdict is the expected one, or undecided, which contradicts no expectation."""
        return self.verdict in (self.expected, "undecided")

    def json(self) -> dict[str, Any]:
        """The ten fields that are printed, in their order."""
        return {name: getattr(self, name) for name in PRINTED}

    def figure(self, *, source: Source = "live", recorded: str = "") -> Figure:
        """The result as charts and numbers; `recorded` is where a recorded result comes from."""
        shown = {"recorded": snippet(self.id), "live": self._python()}[source]
        return claim_figure(registry.claim(self.id), vars(self), shown, source, recorded)

    def _repr_html_(self) -> str:
        """The figure, for notebooks."""
        from levelhead.lab import figure_html

        return figure_html.result(self.figure(), self.verdict, self.expected, self.criterion)

    def _python(self) -> str:
        arguments = f'"{self.id}", seed={self.seed}, params={dict(self.params)!r}'
        return f"import levelhead as lh\n\n(result,) = lh.lab.run({arguments})\nprint(result.figure())\n"


def result_of(task: Task, outcome: Mapping[str, Any]) -> Result:
    """A claim with the outcome of its experiment, as `outcome_json` returns it."""
    claim = task.claim
    declared = {name: getattr(claim, name) for name in ("id", "claim", "criterion", "expected")}
    return Result(**declared, params=_json(task.params), seed=task.seed, **outcome)


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """An experiment's outcome as JSON values; raises if there is something else in it."""
    if outcome.verdict not in VERDICTS:
        raise ValueError(f"the verdict is {outcome.verdict!r}, not one of {', '.join(VERDICTS)}")
    return _json(vars(outcome))


def _json(values: Mapping[str, Any]) -> dict[str, Any]:
    converted: dict[str, Any] = json_value(values, not_finite="infinities as text")
    return converted
