"""The same heads under every scale rule: how many would be flat, level, sharp, saturated.

Counts what a watch measured under other scales; no attention is computed here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from levelhead.runs import tally
from levelhead.runs.record import Run
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
        lines = [["scale", *LEVELS]]
        for rule, counts in self.rules.items():
            lines.append([_NAMES.get(rule, rule), *(str(counts[level]) for level in LEVELS)])
        first, *widths = (max(map(len, column)) for column in zip(*lines, strict=True))
        table = []
        for name, *cells in lines:
            numbers = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
            table.append("  ".join([name.ljust(first), *numbers]))
        return "\n".join([*table, *(self.sentence(rule) for rule in self.rules if rule != AS_IT_IS)])


def counterfactual(run: Run) -> Counterfactual:
    """The levels of every head that was seen last, under each rule that was measured."""
    records = run.latest
    tallies: dict[str, list[Floats]] = {AS_IT_IS: [record.tally for record in records]}
    for record in records:
        for rule, under_rule in record.counterfactual.items():
            tallies.setdefault(rule, []).append(under_rule)
    return Counterfactual({rule: _levels(under_rule) for rule, under_rule in tallies.items()})


def _levels(tallies: Iterable[Floats]) -> dict[str, int]:
    counts = Counter(level for x in tallies for level in tally.read(x).levels)
    return {level: counts[level] for level in LEVELS}
