"""The order of sight: a later token must not change an earlier output, where the model says so."""

from __future__ import annotations

import torch

from levelhead.preflight_checks.flight import Flight
from levelhead.preflight_checks.inputs import Batch, Key
from levelhead.preflight_checks.passes import Moved, Tape, moved, same, taped
from levelhead.preflight_checks.result import finding


def causality(flight: Flight, claim: str | None) -> None:
    """Changes a token; earlier outputs must stand still. `claim`: why the model should be causal; None: no sign."""
    name, stream = "causality", flight.batch.stream()
    if stream is None:
        return flight.unknown(name, "a token", "the batch holds no tokens (ids (B, T) or vectors (B, T, C))")
    grid = flight.grid(stream)
    if grid.tokens < 3 or not grid.clear:
        why = "fewer than 3 tokens" if grid.tokens < 3 else "as many rows as tokens: they cannot be told apart"
        return flight.unknown(name, "a token", why)
    unpadded = _unpadded(flight.batch, stream)
    if not unpadded.any():
        return flight.unknown(name, "a token", "every row is padded, and which of its tokens are is not known")
    worst, at = Moved(0.0, None, 0), 0
    for t in sorted({grid.tokens - 1, grid.tokens // 2, 1}, reverse=True):
        after = taped(flight.batch.changed(stream, grid.token(t)))
        if not _changed(flight.tape, after):
            continue
        here = moved(flight.tape, after, grid.at(grid.before(t) & unpadded))
        if here.size > worst.size or not worst.compared:
            worst, at = here, t
    changed = f"token {at} of every row"
    if not worst.compared:
        return flight.unknown(name, changed, "no output has a place for every token, or none moved at all")
    if not worst.size:
        return flight.passed(name, changed, "no earlier output moved")
    what = f"earlier outputs moved by {worst.size:.2g} of the largest"
    if claim is None:
        what += "; nothing says that this model should be causal: pass causal=True if it should"
        return flight.unknown(name, changed, what)
    module = worst.module or ""
    why = f"Later tokens change earlier outputs, although {claim}: the model sees in training what it must predict."
    advice = "Look at the mask in this module: which keys may query t see? Only 0 … t."
    found = finding("not causal", "error", module, why, advice, change=worst.size, token=float(at))
    return flight.failed(name, changed, what, found)


def _unpadded(batch: Batch, stream: Key) -> torch.Tensor:
    """(B, T): tokens that are no padding. A padded query may see anything: its output is ignored. Where 1 may mean
    either, rows with padding are left out as a whole."""
    key = batch.padding_mask()
    if key is None or stream != next(iter(batch.streams())):
        return torch.ones(batch.sizes(stream), dtype=torch.bool)
    mask: torch.Tensor = batch[key].bool().cpu()
    if batch.names[key].endswith("attention_mask"):
        return mask
    return (mask.all(1) | ~mask.any(1))[:, None].expand_as(mask)


def _changed(before: Tape, after: Tape) -> bool:
    """Whether anything moved."""
    pairs = ((old, after.entries[key]) for key, old in before.entries.items() if key in after.entries)
    return any(not same(a, b) for old, new in pairs for a, b in zip(old.outputs, new.outputs, strict=False))
