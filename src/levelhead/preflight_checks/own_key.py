"""Queries that are keys, too (Reformer): a token sees itself only where it sees nothing else. Its own logit is low, and
those of later tokens are lower still."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from levelhead.errors import LevelheadError
from levelhead.preflight_checks.flight import Flight
from levelhead.preflight_checks.passes import Tape, same, taped


def last_resort(flight: Flight, modules: Sequence[str]) -> list[str]:
    """Of modules where no token sees itself, those where the first one does: its output moves with it and with no
    later token. A row without any key is NaN, constant, or an average of all."""
    stream = flight.batch.stream()
    if not modules or stream is None or not flight.grid(stream).clear:
        return []
    first = flight.grid(stream).token(0)
    try:
        own, later = (taped(flight.batch.changed(stream, chosen)) for chosen in (first, ~first))
    except LevelheadError:
        return []
    found = []
    for module in modules:
        now, with_own, with_later = (_first_token(flight, tape, module) for tape in (flight.tape, own, later))
        if now is None or with_own is None or with_later is None or not bool(now.isfinite().all()):
            continue
        if same(now, with_later) and not same(now, with_own):
            found.append(module)
    return found


def _first_token(flight: Flight, tape: Tape, module: str) -> torch.Tensor | None:
    """(rows, columns): what the module gives the first token."""
    stream, entry = flight.batch.stream(), tape.entries.get((module, 0))
    if stream is None or entry is None or not entry.outputs:
        return None
    tokens = flight.grid(stream).by_token(entry.outputs[0])
    return None if tokens is None else tokens[:, 0]
