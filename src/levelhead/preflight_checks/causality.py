"""The order of sight: a later token must not change an earlier output, where the model says so."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from levelhead.errors import LevelheadError
from levelhead.preflight_checks import expected_causal, training_mode
from levelhead.preflight_checks.calls import SeenCall, seen_calls
from levelhead.preflight_checks.flight import Flight
from levelhead.preflight_checks.inputs import Batch, Key
from levelhead.preflight_checks.passes import Moved, Tape, moved, same, taped, tolerance
from levelhead.preflight_checks.places import Grid
from levelhead.preflight_checks.result import MAY_SEE_LATER, finding


@dataclass(frozen=True)
class Claim:
    """Why a model should be causal."""

    why: str
    modules: frozenset[str] | None = None  # attention modules of which it says so; None: the whole model


def causality(flight: Flight, claim: Claim | None, calls: Sequence[SeenCall], *, asked: bool = False) -> None:
    """Changes a token; earlier outputs must stand still. `claim`: None: nothing says that they should;
    `asked`: the user says whether they should."""
    name, stream = "causality", flight.batch.stream()
    if stream is None:
        return flight.unknown(name, "a token", "the batch holds no tokens (ids (B, T) or vectors (B, T, C))")
    grid = flight.grid(stream)
    if grid.tokens < 3 or not grid.clear:
        why = "fewer than 3 tokens" if grid.tokens < 3 else "as many rows as tokens: they cannot be told apart"
        return flight.unknown(name, "a token", why)
    unpadded = flight.batch.unpadded(stream)
    if not unpadded.any():
        return flight.unknown(name, "a token", "every row is padded, and which of its tokens are is not known")
    worst, at, moving = Moved(0.0, None, 0), 0, flight.tape
    for t in sorted({grid.tokens - 1, grid.tokens // 2, 1}, reverse=True):
        after = taped(flight.batch.changed(stream, grid.token(t)))
        if not _changed(flight.tape, after):
            continue
        here = moved(flight.tape, after, grid.at(grid.before(t) & unpadded))
        if here.size > worst.size or not worst.compared:
            worst, at, moving = here, t, after
    changed = f"token {at} of every row"
    if not worst.compared:
        return flight.unknown(name, changed, "no output has a place for every token, or none moved at all")
    if not worst.size:
        return _in_training(flight, stream, changed, unpadded)
    what = f"earlier outputs moved by {worst.size:.2g} of the largest"
    if claim is None and asked:
        return flight.unknown(name, changed, f"{what}; {MAY_SEE_LATER}")
    expected = expected_causal.evidence(flight, calls) if claim is None else None
    if expected is not None:
        why = (
            f"Later tokens change earlier outputs, although {expected}. If the model predicts the next token, it sees "
        )
        why += "in training what it must predict."
        advice = "Hide later keys; or pass causal=False if tokens may see later ones."
        found = finding("not causal", "warning", worst.module or "", why, advice, change=worst.size, token=float(at))
        return flight.failed(name, changed, what, found)
    if claim is None:
        what += "; nothing says that this model should be causal: pass causal=True if it should"
        return flight.unknown(name, changed, what)
    module = worst.module or ""
    changed_batch = flight.batch.changed(stream, grid.token(at))
    attending = _readers(changed_batch, calls) if claim.modules is not None else frozenset()
    inner = flight.model if module == "" else dict(flight.model.named_modules())[module]
    unlocated = isinstance(inner, nn.Embedding) or (module == "" and module not in attending)
    if claim.modules is not None and unlocated and not _mixes(flight.tape, moving, grid, at):
        what += ", because the model itself moves tokens before its layers (a flip, a shift, a second direction)"
        return flight.unknown(name, changed, f"{what}; pass causal=True if the whole model should be causal")
    if (other := _elsewhere(module, claim, attending)) is not None:
        return flight.unknown(name, changed, f"{what}, {other}; pass causal=True if the whole model should be causal")
    why = f"Later tokens change earlier outputs, although {claim.why}: the model sees in training what it must predict."
    advice = "Look at the mask in this module: which keys may query t see? Only 0 … t."
    found = finding("not causal", "error", module, why, advice, change=worst.size, token=float(at))
    return flight.failed(name, changed, what, found)


def _in_training(flight: Flight, stream: Key, changed: str, unpadded: Tensor) -> None:
    """The same in training mode, of a model that is causal in evaluation."""
    name, T = "causality", flight.grid(stream).tokens
    there = training_mode.later_tokens(flight, stream, [T - 1, T // 2], unpadded)
    if isinstance(there, str):
        return flight.passed(name, changed, f"no earlier output moved; in evaluation mode: in training {there}")
    if not there.size:
        return flight.passed(name, changed, "no earlier output moved, neither in evaluation nor in training mode")
    why = "In training mode later tokens change earlier outputs, and in evaluation mode they do not: the mask is "
    why += "applied on one path only, and the model sees in training what it must predict."
    advice = "Look for self.training in this module: both paths need the mask."
    found = finding("not causal", "error", there.module or "", why, advice, change=there.size)
    what = f"in training mode earlier outputs moved by {there.size:.2g} of the largest"
    return flight.failed(name, changed, what, found)


def _elsewhere(module: str, claim: Claim, attending: Collection[str]) -> str | None:
    """Why a module that lets later tokens through is none of those that should not; None: it is one of them."""
    if claim.modules is None:
        return None
    here = {a for a in attending if a == module or f"{a}.".startswith(f"{module}.") or f"{module}.".startswith(f"{a}.")}
    if here:
        return None if here & claim.modules else f"first through {module}, whose mask is not causal"
    if set(attending) <= claim.modules:
        return None
    return f"first through {module or 'the model itself'}, and not all attention of this model is causal"


def _readers(changed: Batch, calls: Sequence[SeenCall]) -> frozenset[str]:
    """Modules whose keys move with the token: an encoder and its readers do not read what a decoder is given."""
    try:
        after = seen_calls(changed)[1]
    except LevelheadError:
        after = []
    if [call.module for call in after] != [call.module for call in calls]:
        return frozenset(call.module for call in calls)
    return frozenset(old.module for old, new in zip(calls, after, strict=True) if not same(old.k, new.k))


def _mixes(before: Tape, after: Tape, grid: Grid, t: int) -> bool:
    """Whether tokens are mixed where earlier ones move first: a number of one place then moves at several. A flip or a
    shift moves it at one."""
    for key, old in before.entries.items():
        new = after.entries.get(key)
        pairs = [] if new is None else list(zip(old.inputs or old.outputs, new.inputs or new.outputs, strict=False))
        for a, b in pairs:
            x, y = (grid.by_token(z) if a.shape == b.shape else None for z in (a, b))
            if key[0] == "" or x is None or y is None:
                continue
            moved_at = (x - y).abs() > tolerance(x.dtype) * x.abs().max()  # (rows, tokens, columns)
            early = moved_at[:, :t].any(1)
            if bool(early.any()):
                return bool((moved_at.sum(1)[early] > 1).float().mean() > 0.5)
    return True  # at the end of the model


def _changed(before: Tape, after: Tape) -> bool:
    """Whether anything moved."""
    pairs = ((old, after.entries[key]) for key, old in before.entries.items() if key in after.entries)
    return any(not same(a, b) for old, new in pairs for a, b in zip(old.outputs, new.outputs, strict=False))
