"""Two runs of the same architecture, head by head: what changed, the largest change first.

A description: whether a change is an improvement is not decided. Runs of different architectures have no heads in
common and are refused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from levelhead import stats
from levelhead.errors import bad_value
from levelhead.json_numbers import json_value
from levelhead.observation import number
from levelhead.runs.record import Record, Run
from levelhead.words import module_title, plural

# How much a doubled maximum weighs beside H/ln n, which runs from 0 to 1: as much as a tenth of it.
_DOUBLED = 0.1
_SHOWN = 10


@dataclass(frozen=True)
class Change:
    """One head in two runs: before and after."""

    module: str
    head: int
    level: tuple[stats.Level, stats.Level]
    normalised_entropy: tuple[float, float]
    max_logit: tuple[float, float]
    sampled: tuple[bool, bool] = (False, False)  # then it is a lower bound

    @property
    def size(self) -> float:
        """How far apart the two are; what is NaN on one side only is infinitely far."""
        before, after = self.normalised_entropy
        if math.isnan(before) or math.isnan(after):
            return 0.0 if math.isnan(before) and math.isnan(after) else math.inf
        return max(abs(after - before), _DOUBLED * self._doublings())

    def _doublings(self) -> float:
        before, after = (max(abs(x), 1.0) for x in self.max_logit)  # below 1 it hardly matters
        return abs(math.log2(after / before)) if math.isfinite(before + after) else math.inf

    def __str__(self) -> str:
        levels = self.level[0] if len(set(self.level)) == 1 else " → ".join(self.level)
        entropies = " → ".join(number(x) for x in self.normalised_entropy)
        largest = " → ".join("≥" * bound + number(x, 2) for x, bound in zip(self.max_logit, self.sampled, strict=True))
        where = f"{module_title(self.module)}, head {self.head}"
        return f"{where}: {levels}, H/ln n {entropies}, max logit {largest}"


@dataclass(frozen=True)
class Comparison:
    """Every head of two runs, the one that changed most first."""

    before: str
    after: str
    changes: tuple[Change, ...]

    @property
    def moved(self) -> Counter[tuple[str, str]]:
        """How many heads went from which level to which other."""
        return Counter(change.level for change in self.changes if len(set(change.level)) > 1)

    def lines(self) -> Iterator[str]:
        """In words: how many heads changed level, and which changed most."""
        yield f"From {self.before} to {self.after}:"
        moved = ", ".join(f"{n} {a} → {b}" for (a, b), n in self.moved.most_common())
        n, total = self.moved.total(), plural(len(self.changes), "head")
        yield f"  {n} of {total} changed level" + (f": {moved}" if moved else "")
        different = [change for change in self.changes if change.size > 0]
        if not different:
            yield "  no head differs at all"
            return
        yield "  changed most:"
        yield from (f"    {change}" for change in different[:_SHOWN])

    def to_json(self) -> dict[str, Any]:
        """As what `json` can write; a number that is none is null."""
        changes = [{name: json_value(x) for name, x in asdict(change).items()} for change in self.changes]
        return {"before": self.before, "after": self.after, "changes": changes}


def compare(before: Run, after: Run) -> Comparison:
    """What changed from one checkpoint to another of the same architecture."""
    ours, theirs = _shape(before), _shape(after)
    if ours != theirs:
        wanted = f"the attention modules and heads of {after.model}"
        given = f"{before.model}, where {_difference(theirs, ours)}"
        raise bad_value("against", wanted, given, "Compare two checkpoints of one architecture")
    earlier = {record.module: record for record in before.latest}
    pairs = [(earlier[record.module], record) for record in after.latest]
    changes = sorted((change for pair in pairs for change in _changes(*pair)), key=lambda change: -change.size)
    return Comparison(before.model, after.model, tuple(changes))


def _shape(run: Run) -> dict[str, tuple[int, int]]:
    return {record.module: (len(record.tally), record.facts.d_k) for record in run.latest}


def _difference(wanted: dict[str, tuple[int, int]], other: dict[str, tuple[int, int]]) -> str:
    for module, (heads, d_k) in wanted.items():
        if module not in other:
            return f"there is no {module_title(module)}"
        if other[module] != (heads, d_k):
            given, width = other[module]
            return f"{module_title(module)} has {given} heads of width {width}, not {heads} of {d_k}"
    extra = next(module for module in other if module not in wanted)
    return f"there is also {module_title(extra)}"


def _changes(before: Record, after: Record) -> Iterator[Change]:
    both = (before.heads, after.heads)
    levels = zip(*(heads.levels for heads in both), strict=True)
    entropies = zip(*(heads.normalised_entropy.tolist() for heads in both), strict=True)
    largest = zip(*(heads.max_logit.tolist() for heads in both), strict=True)
    for head, pairs in enumerate(zip(levels, entropies, largest, strict=True)):
        yield Change(after.module, head, *pairs, (before.facts.sampled, after.facts.sampled))
