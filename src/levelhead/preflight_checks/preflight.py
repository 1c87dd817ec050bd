"""`preflight(model, batch)`: every check, in order."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torch import nn

from levelhead import checks
from levelhead.checks import short_repr
from levelhead.diagnosis.diagnose import diagnose
from levelhead.diagnosis.findings import Findings
from levelhead.errors import LevelheadError, bad_type
from levelhead.preflight_checks import (
    applied_weights,
    attention_sinks,
    attributes,
    cached_decoding,
    causality,
    cross_masks,
    distances,
    earlier_weights,
    head_scales,
    inputs,
    masks,
    operators,
    padding,
    positions,
    probed_scales,
    projections,
    repeats,
    row_order,
    rows,
    scale_facts,
    scales,
    settings,
    sums_of_columns,
    token_mixing,
    zeros,
)
from levelhead.preflight_checks.calls import SeenCall, seen_calls
from levelhead.preflight_checks.causality import Claim
from levelhead.preflight_checks.flight import Flight
from levelhead.preflight_checks.passes import held_still, taped
from levelhead.preflight_checks.result import Preflight
from levelhead.runs.record import Run
from levelhead.watching import watchable


def preflight(
    model: nn.Module,
    batch: Any,
    *,
    causal: bool | None = None,
    sequence_first: bool = False,
    expected_scale: float | str | None = None,
    against: nn.Module | Run | str | os.PathLike[str] | None = None,
    independent: bool | None = None,
) -> Preflight:
    """Checks a model's attention before training: changes one thing at a time and says what moved that must not.

    The model runs some thirty to forty times, in evaluation mode and without gradients, and is left as it was. Every
    module's results are kept meanwhile: a few short rows are enough.

    Args:
        model: any PyTorch model.
        batch: what it is called with: a mapping by keyword, a tuple or list in order, or else as its one argument.
        causal: whether a token may see only earlier ones; None: as the configuration and the masks say.
        sequence_first: the batch is (tokens, rows, ...), as torch's modules read it without batch_first.
        expected_scale: the scale that is right for this model, where that is not 1/√d_k.
        against: an earlier checkpoint of the same architecture (the model, its file or directory), or a run recorded
            of it, to find a scale that was folded into weights since.
        independent: whether rows of the batch must not change each other; False: they may, as in models of tables.

    >>> import torch
    >>> layer = torch.nn.MultiheadAttention(64, 4, batch_first=True)
    >>> x = torch.randn(2, 16, 64)
    >>> preflight(layer, (x, x, x)).passed
    True
    """
    if not isinstance(model, nn.Module):
        raise bad_type("model", "a torch.nn.Module", short_repr(model), "Give the model itself")
    earlier = None if against is None else earlier_weights.read(against)
    for name, flag in (("causal", causal), ("sequence_first", sequence_first), ("independent", independent)):
        if flag is not None:
            checks.flag(name, flag)
    model = watchable.unwrapped(model)
    attributes.check_numbers(model)
    given = inputs.read(model, batch, sequence_first=sequence_first)
    with held_still(model):
        flight = rows.begin(given)
        attributes.name_unknown(flight.unknown, model)
        run, calls = _seen(flight, expected_scale)
        turned = {record.module for record in run.latest if applied_weights.wrong_axis(record) is not None}
        calls = [seen for seen in calls if seen.module not in turned]  # their logits have other axes
        claims: list[Claim | None] = []
        flight.attempt("form of masks", lambda: claims.append(masks.forms(flight, calls, causal)))
        flight.attempt(cross_masks.NAME, lambda: cross_masks.check(flight, calls))
        flight.attempt("use of projections", lambda: projections.check(flight, calls))
        flight.attempt(token_mixing.NAME, lambda: token_mixing.check(flight, calls))
        flight.attempt(sums_of_columns.NAME, lambda: sums_of_columns.check(flight, calls))
        flight.attempt("applied weights", lambda: claims.append(_weights(flight, run, calls)))
        flight.attempt("order of key heads", lambda: projections.key_groups(flight, calls))
        flight.attempt("one softmax", lambda: operators.check(flight))
        flight.attempt("relative positions", lambda: positions.check(flight, calls))
        flight.attempt("configuration", lambda: settings.check(flight, run, calls))
        flight.attempt("sinks", lambda: attention_sinks.check(flight, calls))
        flight.attempt("QK-norm gains", lambda: scales.norms(flight, run, calls))
        flight.attempt("scale of each head", lambda: head_scales.check(flight, calls))
        flight.attempt("type of the product", lambda: scales.half_products(flight, calls))
        flight.attempt("ALiBi's sign", lambda: distances.check(flight, run, calls))
        flight.attempt("finite outputs", lambda: repeats.finite(flight))
        flight.attempt("dropout off in eval", lambda: repeats.same_twice(flight))
        claim = _claim(model, calls, next(filter(None, claims), None), causal)
        with zeros.filled(flight) as moving:
            again = calls if moving is flight else _seen(moving, expected_scale)[1]
            again = [seen for seen in again if seen.module not in turned]
            _moved(moving, again, claim, independent, asked=causal is not None)
        runs = [run]
        flight.attempt("effective scale", lambda: runs.append(probed_scales.read(flight, run, calls)))
        flight.attempt("effective scale", lambda: runs.append(scale_facts.corrected(flight, runs[-1])))
        run = runs[-1]
        judged = scales.named(flight, run, diagnose(run)) if run.latest else []
        if earlier is not None:
            judged = earlier_weights.against(flight, earlier, run, judged)
    return Preflight(type(model).__name__, tuple(flight.checks), Findings([*judged, *flight.findings]))


def _seen(flight: Flight, expected_scale: float | str | None) -> tuple[Run, list[SeenCall]]:
    """Calls, those by hand too where the model runs under the mode that finds them."""
    try:
        return seen_calls(flight.batch, deep=True, expected_scale=expected_scale)
    except LevelheadError:
        return seen_calls(flight.batch, deep=False, expected_scale=expected_scale)


def _moved(
    flight: Flight, calls: list[SeenCall], claim: Claim | None, independent: bool | None, *, asked: bool
) -> None:
    """Checks that change tokens or rows, and look where outputs move."""
    keys, modules = {seen.module: seen.keys for seen in calls}, {seen.module for seen in calls}
    flight.attempt("batch independence", lambda: rows.batch_independence(flight, keys, independent))
    flight.attempt("causality", lambda: causality.causality(flight, claim, calls, asked=asked))
    flight.attempt(cached_decoding.NAME, lambda: cached_decoding.check(flight))
    flight.attempt("padding independence", lambda: padding.padding(flight, modules))
    flight.attempt(row_order.NAME, lambda: row_order.check(flight, independent))


def _weights(flight: Flight, run: Run, calls: list[SeenCall]) -> Claim | None:
    """Of the applied weights; padding would hide keys that a wrong mask shows."""
    plain = flight.batch.without_padding()
    if plain is flight.batch:
        return applied_weights.check(flight, run, calls)
    other = Flight(plain, taped(plain), flight.checks, flight.findings)
    return applied_weights.check(other, run, seen_calls(plain)[1])


def _claim(model: nn.Module, calls: Sequence[SeenCall], seen: Claim | None, causal: bool | None) -> Claim | None:
    """Why the model should be causal; None: nothing says so."""
    if causal is not None:
        return Claim("causal=True says that it must not") if causal else None
    modules, attending = dict(model.named_modules()), frozenset(call.module for call in calls)
    says = [getattr(modules.get(name), word, None) for name in attending for word in ("is_causal", "causal")]
    flags = [flag for flag in says if isinstance(flag, bool)]
    kind = type(model).__name__
    foreign = type(model).__module__.startswith("transformers.")
    marked = flags and all(flags) and not any(map(masks.deliberate, calls))
    if marked and (not foreign or kind.endswith(("ForCausalLM", "LMHeadModel"))):
        return Claim("its attention modules are marked as causal", attending)
    return seen
