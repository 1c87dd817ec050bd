"""What is shown of a run, in words and cells: the same on a terminal, in a file, in a notebook.

This file chooses the words, `text` and `html` the looks. A level is a description, not a finding: healthy models have
saturated heads on purpose.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from levelhead import stats
from levelhead.diagnosis.findings import SEVERITIES, Finding, Severity
from levelhead.diagnosis.wrong_scale import looks_like
from levelhead.observation import number
from levelhead.runs import row_sample
from levelhead.runs.counterfactual import counterfactual
from levelhead.runs.record import Record, Run
from levelhead.words import module_title, plural

# The fuller the disc, the fewer keys a head attends to: an order that needs no colour.
GLYPHS: Mapping[str, str] = {"flat": "○", "level": "◔", "sharp": "◑", "saturated": "●", "none": "·"}
MEANINGS: Mapping[stats.Level, str] = {
    "flat": "hardly tells keys apart",
    "level": "weighs many keys",
    "sharp": "picks a few keys",
    "saturated": "picks one key",
    "none": "nothing seen",
}


# ---- heads ------------------------------------------------------------------


def columns(record: Record, *, digits: int = 3) -> dict[str, list[str]]:
    """Title to cells, one cell per head. Empty columns are left out."""
    heads, facts = record.heads, record.facts
    levels = heads.levels
    entropies = heads.normalised_entropy
    bound = "≥" if facts.sampled else ""
    shown = {
        "head": [str(h) for h in range(len(levels))],
        "gauge": [stats.gauge(float(x), level) for x, level in zip(entropies, levels, strict=True)],
        "level": [str(level) for level in levels],
        "H/ln n": _numbers(entropies, digits),
        "top-1": _numbers(heads.mean_top1, digits),
        "max logit": [bound * math.isfinite(x) + number(x, 2) for x in heads.max_logit],
        "at b,q,k": [place(record, h) for h in range(len(levels))],
        "logit std": _numbers(np.sqrt(heads.var_logit), 2),
        "saturated": [number(100 * x, 0, "%") for x in heads.saturated],
        "gradient left": _numbers(heads.gradient, digits),
        "first key": _numbers(heads.mean_first, digits),
    }
    if facts.sinks:
        shown["sink"] = _numbers(heads.mean_sink, digits)
    if heads.nan_rows.any():
        shown["NaN rows"] = [str(int(n)) for n in heads.nan_rows]
    for title, norms in (("‖dq‖", heads.dq_norm), ("‖dk‖", heads.dk_norm), ("‖dv‖", heads.dv_norm)):
        if np.isfinite(norms).any():
            shown[title] = [short(x) for x in norms]
    return shown


def place(record: Record, head: int) -> str:
    """Where the largest logit was: batch row, query, key."""
    heads = record.heads
    batch, query, key = (int(x[head]) for x in (heads.max_batch, heads.max_query, heads.max_key))
    return f"{batch},{query},{key}" if query >= 0 else "-"


def short(x: float) -> str:
    """Three significant digits, for numbers that span many orders of magnitude."""
    return "-" if math.isnan(x) else f"{x:.3g}"


def _numbers(values: Iterable[float], digits: int) -> list[str]:
    return [number(x, digits) for x in values]


def levels(records: Iterable[Record]) -> dict[stats.Level, int]:
    """How many heads are at each level, in the order of MEANINGS."""
    counts = Counter[str](level for record in records for level in record.heads.levels)
    return {level: counts[level] for level in MEANINGS}


def listed(counts: Mapping[Any, int]) -> str:
    """Such as "3 flat, 5 level"; levels without heads are left out."""
    return ", ".join(f"{n} {level}" for level, n in counts.items() if n)


def rules(run: Run) -> dict[str, Mapping[str, int]]:
    """Scale rule to the levels the same heads would have under it; empty if none was tried."""
    tried = counterfactual(run).rules
    return {rule(name): counts for name, counts in tried.items()} if len(tried) > 1 else {}


# ---- modules ----------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """Modules whose names differ in numbers only, such as the layers of a stack."""

    name: str  # with * where the numbers differ
    rows: tuple[tuple[str, Record], ...]  # those numbers, and the module

    @property
    def heads(self) -> int:
        """Of the module that has most."""
        return max(len(record.tally) for _, record in self.rows)


def blocks(records: Sequence[Record]) -> list[Block]:
    """The modules by the shape of their names, in the order in which they were first seen."""
    alike: dict[str, list[Record]] = {}
    for record in records:
        alike.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", record.module), []).append(record)
    return [_block(pattern.split("."), group) for pattern, group in alike.items()]


def _block(pattern: list[str], group: list[Record]) -> Block:
    parts = [record.module.split(".") for record in group]
    differing = [i for i, column in enumerate(zip(*parts, strict=True)) if len(set(column)) > 1]
    name = ".".join("*" if i in differing else part for i, part in enumerate(parts[0]))
    labels = (".".join(row[i] for i in differing) for row in parts)
    return Block(module_title(name), tuple(zip(labels, group, strict=True)))


def facts(record: Record) -> str:
    """The facts of a module's calls, in one line."""
    f = record.facts
    heads = plural(len(record.tally), "head")
    if f.kv_heads != len(record.tally):
        heads += f" on {f.kv_heads} of keys and values"
    words = [
        f"{f.kind} through {f.how}",
        heads,
        f"d_k {f.d_k}",
        f"{f.queries} queries × {f.keys} keys",
        f.dtype,
        *f.mentioned,
        *([", ".join(f.norms_present)] if f.norms_present else []),
        scale(record),
        row_sample.rows(record),
    ]
    return ", ".join(words)


def scale(record: Record) -> str:
    """The scale passed and the scale that took effect, with the rule each looks like."""
    f = record.facts
    passed, effective = (None if x is None else _scale(x, record) for x in (f.scale, f.effective_scale))
    if effective is None:
        return f"scale {passed or 'unknown'} (in effect: {f.scale_reading})"
    if passed in (None, effective):
        return f"scale {effective} in effect"
    return f"scale {passed}, in effect {effective}"


def _scale(value: float, record: Record) -> str:
    f = record.facts
    known = looks_like(value, heads=len(record.tally), d_k=f.d_k, width=f.model_width)
    return f"{value:.4g}" + "".join(f" ≈ {rule(name)}" for name in known if name != "none")


def rule(name: str) -> str:
    """A scale rule's name as one writes it by hand."""
    return re.sub(r"sqrt\((\w+)\)", r"√\1", name)


# ---- the run ----------------------------------------------------------------


def opening(run: Run) -> str:
    """How much was recorded, and how exactly."""
    records = run.latest
    if not records:
        return "no attention was seen"
    heads = sum(len(record.tally) for record in records)
    sampled = [record for record in records if record.facts.sampled]
    how = row_sample.limits(sampled) if sampled else "every row counted"
    if 0 < len(sampled) < len(records):
        how = f"{len(sampled)} of {len(records)} modules from {how}"
    steps = len(run.snapshots)
    when = f"; step {run.last.step}, the last of {steps} observed" if steps > 1 else ""
    return f"{plural(heads, 'head')} in {plural(len(records), 'attention module')}, {how}{when}"


def coverage(run: Run) -> Iterator[str]:
    """Which attention modules were seen, in a line; then those that were not, one by one."""
    if not run.coverage:
        return
    seen = [line for line in run.coverage if line.seen]
    ways = Counter(line.how for line in seen)
    through = ", ".join(f"{n} through {how}" for how, n in ways.items())
    yield f"{len(seen)} of {plural(len(run.coverage), 'attention module')} seen" + (f": {through}" if through else "")
    for line in run.coverage:
        if not line.seen:
            yield f"not seen: {module_title(line.module)} ({line.kind}): {line.how}"
    for note, n in Counter(line.note for line in run.coverage if line.note).items():
        yield f"{note} ({plural(n, 'module')})"


def cost(run: Run) -> Iterator[str]:
    """What watching cost, in one line."""
    spent = run.cost
    if spent.get("observed_steps"):
        yield (
            f"watching took {spent['milliseconds_per_observed_step']:.1f} ms per observed step, "
            f"{100 * spent['share']:.1f} % of the time ({spent['observed_steps']:.0f} of "
            f"{plural(int(spent['steps']), 'step')} observed)"
        )


def shares(counts: Mapping[str, int], cells: int) -> dict[str, int]:
    """The counts in proportion, as whole cells of a bar; whatever there is gets one at least."""
    total = sum(counts.values())
    cells_of = {level: max(1, n * cells // total) if n else 0 for level, n in counts.items()}
    largest_rest = sorted(counts, key=lambda level: -(counts[level] * cells % max(total, 1)))
    for level in largest_rest:
        if sum(cells_of.values()) < cells and counts[level]:
            cells_of[level] += 1
    excess = sum(cells_of.values()) - cells
    if excess > 0:
        cells_of[max(cells_of, key=lambda level: cells_of[level])] -= excess
    return cells_of


# ---- findings ---------------------------------------------------------------


def marks(findings: Iterable[Finding]) -> dict[tuple[str, int | None], Severity]:
    """The gravest alarm of each module (head None) and head that has one."""
    gravest: dict[tuple[str, int | None], Severity] = {}
    alarms = [finding for finding in findings if finding.severity != "note"]
    for finding in sorted(alarms, key=lambda finding: SEVERITIES.index(finding.severity)):
        for head in finding.head if isinstance(finding.head, tuple) else (finding.head,):
            gravest[finding.module, head] = finding.severity
    return gravest
