"""What the lab says about one claim: theory beside measurement, the verdict beside the expected.

A result is JSON through and through, so that one read back from a file equals one just measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from levelhead.json_numbers import json_value
from levelhead.lab.claim import VERDICTS, Claim, Outcome, Params, Verdict

__all__ = ["PRINTED", "Result", "outcome_json", "result_of"]

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
    details: Mapping[str, Any] = field(default_factory=dict)  # series for figures; not printed

    @property
    def as_expected(self) -> bool:
        """Whether the lab is content. What could not be decided contradicts nobody."""
        return self.verdict in (self.expected, "undecided")

    def json(self) -> dict[str, Any]:
        """The ten fields that are printed, in their order."""
        return {name: getattr(self, name) for name in PRINTED}


def result_of(claim: Claim, params: Params, seed: int, found: Mapping[str, Any]) -> Result:
    """A claim and the outcome of its experiment, as `outcome_json` gives it."""
    return Result(
        id=claim.id,
        claim=claim.claim,
        theory=found["theory"],
        measured=found["measured"],
        stderr=found["stderr"],
        criterion=claim.criterion,
        expected=claim.expected,
        verdict=found["verdict"],
        params=_json(params),
        seed=seed,
        details=found["details"],
    )


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """An experiment's outcome as JSON values; raises if there is something else in it."""
    if outcome.verdict not in VERDICTS:
        raise ValueError(f"the verdict is {outcome.verdict!r}, not one of {', '.join(VERDICTS)}")
    return _json(vars(outcome))


def _json(values: Mapping[str, Any]) -> dict[str, Any]:
    converted: dict[str, Any] = json_value(values, not_finite="infinities as text")
    return converted
