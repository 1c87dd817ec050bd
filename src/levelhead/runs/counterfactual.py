"""The same heads under every scale rule: how many would be flat, level, sharp, saturated.

Counts what a watch measured under other scales; no attention is computed here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from levelhead.runs import tally
from levelhead.runs.record import Record, Run
from levelhead.runs.tally import LEVELS, Floats

AS_IT_IS = "as it is"
_NAMES = {
    "none": "without the scale",
    "1/sqrt(d_k)": "with 1/√d_k",
    "1/d_k": "with 1/d_k",
    "1/sqrt(d)": "with 1/√d of the whole width",
}


@dataclass(frozen=True)
class Counterfactual:
    """Scale rule -> level -> heads; the first rule is what the model really did."""

    rules: Mapping[str, Mapping[str, int]]

    @property
    def heads(self) -> int:
        """Heads that have a level as it is."""
        return sum(self.rules[AS_IT_IS].values())

    def sentence(self, rule: str) -> str:
        """Such as "without the scale, 61 of 72 heads would be saturated"."""
        counts = self.rules[rule]
        total = sum(counts.values())
        level = "saturated" if counts["saturated"] >= counts["flat"] else "flat"
        be = "are" if rule == AS_IT_IS else "would be"
        words = _NAMES.get(rule, rule if rule == AS_IT_IS else f"with {rule}")
        if not counts[level]:
            return f"{words}, none of {total} heads {be} flat or saturated"
        return f"{words}, {counts[level]} of {total} heads {be} {level}"

    def __str__(self) -> str:
        titles = ["scale", *LEVELS]
        lines = [titles] + [
            [_NAMES.get(rule, rule), *(str(counts[level]) for level in LEVELS)] for rule, counts in self.rules.items()
        ]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = [
            "  ".join(
                [line[0].ljust(widths[0])]
                + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
            )
            for line in lines
        ]
        return "\n".join([*table, *(self.sentence(rule) for rule in self.rules if rule != AS_IT_IS)])


def counterfactual(run: Run) -> Counterfactual:
    """The levels of every head that was seen last, under each rule that was measured."""
    records = run.latest
    names = dict.fromkeys(rule for record in records for rule in record.counterfactual)
    rules = {AS_IT_IS: _levels(record.tally for record in records)}
    rules |= {rule: _levels(_under(rule, records)) for rule in names}
    return Counterfactual(rules)


def _under(rule: str, records: Iterable[Record]) -> Iterable[Floats]:
    return (r.counterfactual[rule] for r in records if rule in r.counterfactual)


def _levels(tallies: Iterable[Floats]) -> dict[str, int]:
    counts = Counter(level for x in tallies for level in tally.read(x).levels)
    return {level: counts[level] for level in LEVELS}
