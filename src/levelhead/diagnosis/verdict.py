"""The verdict on a run: whether attention is the cause of what is wrong, and what was not judged.

It is given for clean runs too, with the largest |logit| and its trend. It says "attention is not the cause" only where
every attention module was observed and nothing is left out; else it names what it does not know. No rule is here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from levelhead.diagnosis import logit_growth, thresholds
from levelhead.diagnosis.findings import SEVERITIES, Finding, Verdict, number
from levelhead.runs import row_sample
from levelhead.runs.record import Run
from levelhead.words import module_title, plural

_NAMED = 4  # modules listed by name


def verdict(run: Run, findings: Iterable[Finding]) -> Verdict:
    """What to think of attention in this run."""
    limits = tuple(_not_judged(run))
    serious = [finding for finding in findings if finding.severity != "note"]
    if not serious and _sampled_high(run):
        was = f"sampled rows had logits above {thresholds.DETERIORATES:.0e}".replace("e+0", "e")
        return Verdict(f"attention may be the cause: {was}, later samples had none; {_largest(run)}", limits)
    if not serious:
        so_far = " as far as it was judged" if limits else ""
        return Verdict(f"attention is not the cause{so_far}: {_largest(run)}", limits)
    worst = max(serious, key=lambda finding: SEVERITIES.index(finding.severity))
    others = sorted({f.kind for f in serious if f.kind != worst.kind})
    more = f"; also {', '.join(others)}" if others else ""
    be = "is broken" if worst.severity == "error" else "may be the cause"
    return Verdict(f"attention {be}: {worst.kind} in {worst.where}{more}; {_largest(run)}", limits)


# ---- the largest |logit|


def _sampled_high(run: Run) -> bool:
    """Whether a lower bound of the largest |logit| is where the loss suffers: that it has fallen is not known."""
    records = (record for snapshot in run.snapshots for record in snapshot.records if record.facts.sampled)
    return any((logit_growth.largest(record) >= thresholds.DETERIORATES).any() for record in records)


def _largest(run: Run) -> str:
    curves = logit_growth.curves(run)
    peaks = {name: float(np.nanmax(curve.values, initial=-1.0)) for name, curve in curves.items()}
    module = max(peaks, key=lambda name: peaks[name], default="")
    if peaks.get(module, -1.0) < 0:
        return "no logit was recorded"
    curve = curves[module]
    row = int(np.nanargmax(np.nanmax(np.where(np.isnan(curve.values), -1.0, curve.values), axis=1)))
    when = f" at step {int(curve.steps[row])}" if len(run.snapshots) > 1 else ""
    where = "" if run.model == "observation" else f" in {module_title(module)}"
    sampled = any(r.facts.sampled for s in run.snapshots for r in s.records if r.module == module)
    bound = "at least " if sampled else ""
    return f"largest |logit| {bound}{number(peaks[module])}{when}{where}{_trend(curves.values())}"


def _trend(curves: Iterable[logit_growth.Curve]) -> str:
    """In words; nothing where there are too few points to have one, as `_not_judged` says so."""
    judged = [curve for curve in curves if len(curve.steps) >= thresholds.POINTS]
    heads = sum(curve.values.shape[1] for curve in judged)
    if not heads:
        return ""
    rising = sum(logit_growth.is_rising(curve, head) for curve in judged for head in range(curve.values.shape[1]))
    return f", rising in {rising} of {plural(heads, 'head')}" if rising else ", no trend"


# ---- limits


def _not_judged(run: Run) -> Iterator[str]:
    yield from _unseen(run)
    records, number_of_steps = run.latest, len(run.snapshots)
    unread = Counter(r.facts.scale_reading for r in records if r.facts.effective_scale is None)
    for reason, n in unread.items():
        yield f"the scale of {plural(n, 'module')}: {reason}"
    if not any(np.isfinite(r.heads.dq_norm).any() for s in run.snapshots for r in s.records):
        asked = any("dL/dq" in line.note or "gradients" in line.note for line in run.coverage)
        yield f"whether heads still learn: gradients were not {'recorded' if asked else 'watched'}"
    if sampled := [record for record in records if record.facts.sampled]:
        yield f"rows that were not sampled, in {plural(len(sampled), 'module')}: {row_sample.limits(sampled)}"
    if number_of_steps < thresholds.POINTS:
        steps = "one step" if number_of_steps == 1 else plural(number_of_steps, "step")
        yield f"growth: {steps}: no trend can be judged ({thresholds.POINTS} are needed)"


def _unseen(run: Run) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for line in run.coverage:
        if not line.seen:
            reasons.setdefault(line.how, []).append(module_title(line.module))
    for reason, modules in reasons.items():
        names = ", ".join(modules[:_NAMED]) + (f" and {len(modules) - _NAMED} more" if len(modules) > _NAMED else "")
        yield f"{names}: {reason or 'not called'}"
    for note, n in Counter(line.note for line in run.coverage if line.seen and line.note).items():
        yield f"{note} ({plural(n, 'module')})"
    if not run.coverage and run.model != "observation":
        yield "modules that this record does not have: it came without a coverage report"
