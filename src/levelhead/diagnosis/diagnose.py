"""`diagnose`: the findings about what a watch recorded.

Turns its argument into a `Run` and runs every check on it; it needs no model. The checks are in `symptoms`,
`wrong_scale` and `logit_growth`, their bounds in `thresholds`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from levelhead.checks import short_repr
from levelhead.diagnosis import logit_growth, symptoms, wrong_scale
from levelhead.diagnosis.findings import BOUNDED, ESTIMATED, SAMPLED, Finding, Findings
from levelhead.diagnosis.verdict import verdict
from levelhead.errors import bad_type, bad_value
from levelhead.observation import Observation
from levelhead.runs import files, row_sample, run_from_observation
from levelhead.runs.record import Run
from levelhead.words import module_title, plural


def diagnose(what: Any, *, expected_scale: float | str | None = None) -> Findings:
    """What is wrong with these heads, or worth knowing: the gravest first; and a verdict, for a clean run too.

    Args:
        what: a watch, a `Run`, an `Observation`, or the path of a file that one was saved to.
        expected_scale: the scale that is right for this model, a number or the name of a rule, where that is not
            1/√d_k.

    >>> import numpy as np
    >>> from levelhead import observe
    >>> q = np.random.default_rng(0).standard_normal((8, 128, 64)).astype(np.float32)
    >>> diagnose(observe(q, q[::-1]))
    Observation of 8 heads, 128 queries and 128 keys: no findings
    verdict: attention is not the cause as far as it was judged: largest |logit| 4.18
    not judged: the scale of 1 module: not kept by an observation
    not judged: whether heads still learn: gradients were not watched
    not judged: growth: one step: no trend can be judged (8 are needed)
    """
    wanted = wrong_scale.checked("expected_scale", expected_scale)
    run = as_run(what)
    if wanted is None:
        wanted = wrong_scale.checked("Run.expected_scale", run.expected_scale)
    if not run.latest:
        unseen = [f"{module_title(line.module)} ({line.kind}): {line.how}" for line in run.coverage if not line.seen]
        given = "; ".join(["none", *filter(None, [run.by_hand]), *unseen])
        advice = "Run the model while it is watched, then diagnose"
        raise bad_value("what", "at least one observed attention call", given, advice)
    found = list(bounded(_checked(run, wanted), run))
    return Findings(found, _about(run), verdict(run, found))


def as_run(what: Any) -> Run:
    """The run in whatever `diagnose` takes."""
    if isinstance(what, Run):
        return what
    if isinstance(what, Observation):
        return run_from_observation.as_run(what)
    if isinstance(what, str | os.PathLike):
        return files.read(what)
    if callable(getattr(what, "run", None)) and isinstance(run := what.run(), Run):
        return run
    wanted = "a watch, a Run, an Observation or the path of a saved run"
    advice = "For a model, watch it first: with lh.watch(model) as w: model(...)"
    raise bad_type("what", wanted, short_repr(what), advice)


def of_the_moment(run: Run, wanted: float | str | None) -> Iterator[Finding]:
    """Every rule but growth, which needs the whole run: what its newest steps show."""
    return _checked(run, wanted, but=logit_growth.check)


def bounded(findings: Iterable[Finding], run: Run) -> Iterator[Finding]:
    """The findings, where a maximum or a count is of sampled rows with their number: a lower bound, or an estimate."""
    sampled = {record.module: record for record in run.latest if record.facts.sampled}
    for finding in findings:
        if finding.module in sampled and not finding.evidence.keys().isdisjoint(BOUNDED + ESTIMATED):
            rows = float(row_sample.measured(sampled[finding.module]))
            finding = replace(finding, evidence={**finding.evidence, SAMPLED: rows})
        yield finding


def _checked(run: Run, wanted: float | str | None, but: Any = None) -> Iterator[Finding]:
    yield from wrong_scale.check(run, wanted)
    for check in symptoms.OF_A_RUN:
        if check is not but:
            yield from check(run)
    for record in run.latest:
        for check_record in symptoms.OF_A_RECORD:
            yield from check_record(record)


def _about(run: Run) -> str:
    heads = sum(len(record.tally) for record in run.latest)
    if run.model == "observation":
        facts = run.latest[0].facts
        return f"Observation of {heads} heads, {facts.queries} queries and {facts.keys} keys"
    modules, steps = plural(len(run.latest), "attention module"), plural(len(run.snapshots), "step")
    return f"{run.model or 'The model'}, {plural(heads, 'head')} of {modules}, {steps} observed"
