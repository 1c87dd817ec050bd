"""Rows of a batch in another order must give the same results in that order: what a row gets may not depend on its
place in the batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.preflight_checks.flight import Flight
from levelhead.preflight_checks.inputs import Batch, Key
from levelhead.preflight_checks.passes import Entry, Tape, moved, taped
from levelhead.preflight_checks.places import Grid
from levelhead.preflight_checks.result import finding

NAME, KIND = "order of rows", "results depend on the place in the batch"
_CHANGED = "the order of the rows"
_LEAST = 1e-3  # own: sums in another order differ by less


def check(flight: Flight, independent: bool | None) -> None:
    """Moves every row one place further. `independent`: False: rows may mix."""
    batch, rows = flight.batch, flight.batch.rows
    stream = batch.stream()
    random = any(c.name == "dropout off in eval" and c.verdict != "passed" for c in flight.checks)
    mixed = any(c.name == "batch independence" and c.verdict != "passed" for c in flight.checks)
    if rows < 2 or independent is False or random or mixed or stream is None or not flight.grid(stream).clear:
        why = "one row, rows that mix, random results, or rows that cannot be told from tokens"
        return flight.unknown(NAME, _CHANGED, why)
    rolled = _rolled(batch, stream)
    if rolled is None:
        return flight.unknown(NAME, _CHANGED, "the batch holds something whose rows are not known")
    if any(_keeps(vars(module), rows) for module in flight.model.modules()):
        return flight.unknown(NAME, _CHANGED, "the model keeps something for each row, such as a cache")
    grid = flight.grid(stream)
    here = moved(_by_row(flight.tape, grid, 0), _by_row(taped(rolled), grid, 1), lambda x: x)
    if not here.compared:
        return flight.unknown(NAME, _CHANGED, "no output has a row for each row of the batch")
    if here.size < _LEAST:
        return flight.passed(NAME, _CHANGED, "results moved with their rows")
    why = "Rows in another order give other results: something is read by the number of the row (positions, slopes of "
    why += "heads, a mask), most often on an axis that has the size of the batch by chance."
    advice = "Look at what is broadcast here: (1, H, 1, 1) for heads, (1, T, 1) for positions."
    what = f"results moved by {here.size:.2g} of the largest"
    if any(f.severity == "error" and f.module == here.module for f in flight.findings):
        return flight.failed(NAME, _CHANGED, f"{what}, by what is named of {here.module} already")
    found = finding(KIND, "error", here.module or "", why, advice, change=here.size, rows=float(rows))
    return flight.failed(NAME, _CHANGED, what, found)


def _rolled(batch: Batch, stream: Key) -> Batch | None:
    """The batch with its rows moved by one; None: an argument may have rows that are not known."""
    rows, tokens = batch.sizes(stream)
    streams = set(batch.streams())
    changes: dict[Key, object] = {}
    for key, x in ((key, batch[key]) for key in [*range(len(batch.args)), *batch.kwargs]):
        if not isinstance(x, Tensor):
            if isinstance(x, int | float | bool | str | type(None)):
                continue
            return None
        axis = 1 if batch.sequence_first and (key in streams or tuple(x.shape[:2]) == (tokens, rows)) else 0
        if x.dim() > axis and x.shape[axis] == rows:
            changes[key] = x.roll(1, axis)
        elif tuple(x.shape) != (tokens, tokens) and x.dim() and x.shape[0] != 1:
            return None
    return batch.with_(changes)


def _keeps(x: Any, rows: int, depth: int = 4) -> bool:
    """Whether a tensor with these rows is kept, in any attribute, list, mapping or object; parameters are passed by."""
    if isinstance(x, nn.Module | nn.Parameter) or depth == 0:
        return False
    if isinstance(x, Tensor):
        return x.dim() > 2 and x.shape[0] == rows
    if isinstance(x, Mapping):
        return any(_keeps(part, rows, depth - 1) for name, part in x.items() if name not in ("_parameters", "_modules"))
    if isinstance(x, list | tuple | set | frozenset | deque):
        return any(_keeps(part, rows, depth - 1) for part in x)
    return hasattr(x, "__dict__") and not isinstance(x, type) and _keeps(vars(x), rows, depth - 1)


def _by_row(tape: Tape, grid: Grid, back: int) -> Tape:
    """Results by row, moved back; those without rows are empty."""

    def rows(x: Tensor) -> Tensor:
        found = grid.by_row(x)
        return torch.empty(0) if found is None else found.roll(-back, 0)

    def entry(old: Entry) -> Entry:
        return Entry(old.module, [rows(x) for x in old.inputs], [rows(x) for x in old.outputs])

    return Tape({key: entry(old) for key, old in tape.entries.items()})
