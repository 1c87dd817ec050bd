"""`preflight(model, batch)`: every check, in order."""

from __future__ import annotations

from typing import Any

from torch import nn

from levelhead import checks
from levelhead.checks import told
from levelhead.diagnosis.diagnose import diagnose
from levelhead.diagnosis.findings import Findings
from levelhead.errors import bad_type
from levelhead.preflight_checks import (
    applied_weights,
    distances,
    independence,
    inputs,
    masks,
    positions,
    scales,
    settings,
)
from levelhead.preflight_checks.calls import SeenCall, seen_calls
from levelhead.preflight_checks.independence import Flight
from levelhead.preflight_checks.passes import held_still
from levelhead.preflight_checks.result import Preflight
from levelhead.watching import module_stack


def preflight(
    model: nn.Module,
    batch: Any,
    *,
    causal: bool | None = None,
    sequence_first: bool = False,
    expected_scale: float | str | None = None,
    against: nn.Module | None = None,
) -> Preflight:
    """Checks a model's attention before training: changes one thing at a time and says what moved that must not.

    The model runs some twenty times, in evaluation mode and without gradients, and is left as it was. Every module's
    results are kept meanwhile: a few short rows are enough.

    Args:
        model: any PyTorch model.
        batch: what it is called with: a mapping by keyword, a tuple or list in order, or else as its one argument.
        causal: whether a token may see only earlier ones; None: as the configuration and the masks say.
        sequence_first: the batch is (tokens, rows, ...), as torch's modules read it without batch_first.
        expected_scale: the scale that is right for this model, where that is not 1/√d_k.
        against: an earlier checkpoint of the same architecture, to find a scale that was folded into weights since.

    >>> import torch
    >>> layer = torch.nn.MultiheadAttention(64, 4, batch_first=True)
    >>> x = torch.randn(2, 16, 64)
    >>> preflight(layer, (x, x, x)).passed
    True
    """
    if not isinstance(model, nn.Module):
        raise bad_type("model", "a torch.nn.Module", told(model), "Give the model itself")
    if against is not None and not isinstance(against, nn.Module):
        raise bad_type("against", "a torch.nn.Module", told(against), "Give the earlier model itself")
    for name, flag in (("causal", causal), ("sequence_first", sequence_first)):
        if flag is not None:
            checks.flag(name, flag)
    model = module_stack.unwrapped(model)
    given = inputs.read(model, batch, sequence_first=sequence_first)
    with held_still(model):
        flight = independence.begin(given)
        run, calls = seen_calls(flight.batch, expected_scale=expected_scale)
        claim = masks.forms(flight, calls)
        claim = applied_weights.check(flight, calls) or claim
        positions.check(flight)
        settings.check(flight, run, calls)
        scales.norms(flight, run, calls)
        distances.check(flight, run, calls)
        _perturbed(flight, calls, _claim(model, claim, causal))
        judged = scales.named(flight, run, diagnose(run)) if run.latest else []
        if against is not None:
            judged = scales.against(flight, module_stack.unwrapped(against), run, judged)
    return Preflight(type(model).__name__, tuple(flight.checks), Findings([*judged, *flight.findings]))


def _perturbed(flight: Flight, calls: list[SeenCall], claim: str | None) -> None:
    independence.same_twice(flight)
    independence.batch_independence(flight, {seen.module: seen.k.shape[2] for seen in calls})
    independence.causality(flight, claim)
    independence.padding(flight)


def _claim(model: nn.Module, seen: str | None, causal: bool | None) -> str | None:
    """Why the model should be causal; None: nothing says so."""
    if causal is not None:
        return "causal=True says that it must not" if causal else None
    return seen
