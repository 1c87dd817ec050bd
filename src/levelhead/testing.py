"""`assert_level`: the doctor's check, for the tests of users.

Runs a model under a watch, then its pre-flight, and fails with the findings. It asserts nothing about outputs. A model
in which no attention was seen is an error.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from levelhead.diagnosis.diagnose import diagnose
from levelhead.errors import bad_value
from levelhead.runs.record import Run
from levelhead.show import text

if TYPE_CHECKING:
    from torch import nn


def assert_level(
    model: nn.Module,
    batch: Any,
    *,
    allow: Collection[str] = (),
    expected_scale: float | str | None = None,
    deep: bool = True,
    rows: int | None = None,
    preflight: bool = True,
) -> Run:
    """Fails if a head of the model is not level on this batch, or its pre-flight finds a fault; returns the run.

    The model runs in evaluation mode and without gradients, and is left as it was.

    Args:
        model: any PyTorch model.
        batch: what it is called with: a mapping by keyword, a tuple or list in order, or else as its one argument.
        allow: kinds of findings that are fine here, such as "wrong scale" or "not causal".
        expected_scale: the scale that is right for this model, where that is not 1/√d_k.
        deep: also see attention that is written out by hand.
        rows: query rows looked at per call; None: all.
        preflight: also run `lh.preflight`, some thirty to forty passes.

    Raises:
        AssertionError: a finding is a warning or an error; its message holds them.
        LevelheadValueError: no attention was seen, so that nothing was checked.

    >>> import torch
    >>> layer = torch.nn.MultiheadAttention(64, 4, batch_first=True)
    >>> x = torch.randn(2, 16, 64)
    >>> len(assert_level(layer, (x, x, x)).latest)
    1
    """
    from levelhead.preflight_checks import inputs, passes
    from levelhead.preflight_checks import preflight as flight
    from levelhead.watching.watch import watch

    read = inputs.read(model, batch)
    with passes.held_still(model), watch(model, deep=deep, rows=rows, expected_scale=expected_scale) as seen:
        passes.run(read)
    run: Run = seen.run()
    if not run.latest:
        given = f"{type(model).__name__}, in which none was seen: {run.by_hand}"
        advice = "Check that the batch reaches the attention, and that deep=True is set"
        raise bad_value("model", "a model that attends", given, advice)
    findings = list(diagnose(run))
    if preflight:
        known = {(one.kind, one.module, one.severity) for one in findings}
        flown = flight.preflight(model, batch, expected_scale=expected_scale).findings
        findings += [one for one in flown if (one.kind, one.module, one.severity) not in known]
    wrong = [one for one in findings if one.severity != "note" and one.kind not in allow]
    if wrong:
        lines = text.finding_lines(wrong, colour=False, width=100)
        raise AssertionError(f"{run.model} is not level:\n" + "\n".join(lines))
    return run
