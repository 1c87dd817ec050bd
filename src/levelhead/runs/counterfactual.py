"""The same heads under every scale rule: how many would be flat, level, sharp, saturated.

Counts what a watch measured under other scales; no attention is computed here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from levelhead.runs import tally
from levelhead.runs.record import Run
from levelhead.runs.tally import LEVELS, Floats
from levelhead.words import aligned

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
        cells = ((_NAMES.get(rule, rule), *(str(n[level]) for level in LEVELS)) for rule, n in self.rules.items())
        table = aligned([("scale", *LEVELS), *cells], left={0})
        return "\n".join([*table, *(self.sentence(rule) for rule in self.rules if rule != AS_IT_IS)])


def counterfactual(run: Run) -> Counterfactual:
    """The levels of every head that was seen last, under each rule that was measured."""
    records = run.latest
    tallies: dict[str, list[Floats]] = {AS_IT_IS: [record.tally for record in records]}
    for record in records:
        for rule, under_rule in record.counterfactual.items():
            tallies.setdefault(rule, []).append(under_rule)
    levels = {rule: Counter(level for x in each for level in tally.read(x).levels) for rule, each in tallies.items()}
    return Counterfactual({rule: {level: counts[level] for level in LEVELS} for rule, counts in levels.items()})
