"""Rows of a batch: which axis they are, and that none changes another."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import torch

from levelhead.errors import LevelheadError
from levelhead.preflight_checks.flight import Flight
from levelhead.preflight_checks.inputs import Batch, Key
from levelhead.preflight_checks.passes import Moved, moved, taped
from levelhead.preflight_checks.places import Grid
from levelhead.preflight_checks.result import finding


def begin(batch: Batch) -> Flight:
    """The first pass; also decides which axis holds the rows."""
    flight = Flight(batch, taped(batch))
    stream = batch.stream()
    if stream is None or batch.sequence_first:
        return flight
    rows, tokens = batch.sizes(stream)
    if rows == tokens and rows > 1 and (fewer := _fewer(batch, rows)) is not None:
        return begin(fewer)
    if rows > tokens > 1:
        other = Flight(replace(batch, sequence_first=True), flight.tape)
        with suppress(LevelheadError):
            if _row(flight, stream, 0).size and not _row(other, stream, 0).size:
                return other  # tokens come first: columns are independent, and there are fewer of them
    return flight


def _fewer(batch: Batch, rows: int) -> Batch | None:
    """One row less, so that rows and tokens can be told apart."""
    changes: dict[Key, object] = {key: x[:-1] for key, x in batch.tensors().items() if x.dim() and x.shape[0] == rows}
    fewer = batch.with_(changes)
    try:
        taped(fewer)
    except LevelheadError:
        return None
    return fewer


def batch_independence(flight: Flight, keys_seen: dict[str, int], meant: bool | None) -> None:
    """Changes row 0 of every stream; the other rows must stand still. `keys_seen`: of each attention module; `meant`:
    what the user says about rows: False: they may mix."""
    name, changed = "batch independence", "row 0 of the batch"
    if meant is False:
        return flight.unknown(name, changed, "independent=False: rows may mix")
    stream, rows = flight.batch.stream(), flight.batch.rows
    if rows < 2:
        return flight.unknown(name, changed, "the batch has one row, or its rows are not known; give at least two")
    if stream is not None and not flight.grid(stream).clear:
        return flight.unknown(name, changed, "there are as many rows as tokens; give another number of rows")
    here = _row(flight, stream, 0)
    if not here.compared:
        return flight.unknown(name, changed, "no output has a row for each row of the batch")
    if not here.size and not _row(flight, stream, 0, own=True).size:
        return flight.unknown(name, changed, "its own output did not move, so that nothing can be said about others")
    if not here.size:
        return flight.passed(name, changed, "no other row moved")
    if not _confirmed(flight, stream):
        return flight.unknown(name, changed, "a size of the model is the number of rows; give another number of rows")
    module = here.module or ""
    if meant is None and _by_design(flight, module, keys_seen):
        what = f"other rows moved by {here.size:.2g}: {module} attends over the rows, other modules over tokens, which "
        return flight.unknown(name, changed, what + "may be meant; independent=True says that it is not")
    why, advice = _why_rows(flight, module, keys_seen)
    found = finding("batch rows mixed", "error", module, why, advice, change=here.size, rows=float(rows))
    return flight.failed(name, changed, f"other rows moved by {here.size:.2g} of the largest output", found)


def _confirmed(flight: Flight, stream: Key | None) -> bool:
    """Whether rows are mixed with one row more, too: a stack of layers may look like rows."""
    batch, rows = flight.batch, flight.batch.rows
    axis = 1 if batch.sequence_first else 0
    changes: dict[Key, object] = {}
    for key, x in batch.tensors().items():
        at = 0 if key not in batch.streams() else axis
        if x.dim() > at and x.shape[at] == rows:
            changes[key] = torch.cat((x, x.narrow(at, 0, 1)), at)
    more = batch.with_(changes)
    if stream is not None and not Grid(*more.sizes(stream)).clear:
        return True
    try:
        return bool(_row(Flight(more, taped(more)), stream, 0).size)
    except LevelheadError:
        return True


def _row(flight: Flight, stream: Key | None, row: int, *, own: bool = False) -> Moved:
    """What a change of a row moves in the others, or in itself."""
    batch = flight.batch
    if stream is None:
        key = next(k for k, x in batch.tensors().items() if x.is_floating_point() and x.dim() > 3)
        x = batch[key].clone()
        x[row] = x[row] + torch.randn_like(x[row]) * x.float().std().to(x)
        return moved(flight.tape, taped(batch.with_({key: x})), Grid(batch.rows, 0).of_rows(row, own=own))
    grid = flight.grid(stream)
    for key in batch.streams():
        each = Grid(*batch.sizes(key))
        if each.rows == grid.rows:
            chosen = torch.zeros(each.rows, each.tokens, dtype=torch.bool)
            chosen[row] = True
            batch = batch.changed(key, chosen)
    return moved(flight.tape, taped(batch), grid.of_rows(row, own=own))


def _by_design(flight: Flight, module: str, keys_seen: dict[str, int]) -> bool:
    """Whether attention over rows stands beside attention over tokens (tables: SAINT, TabPFN), and no module of torch
    reads its axes in another order than it is given."""
    rows, tokens = _sizes(flight)
    inside = {name: keys for name, keys in keys_seen.items() if name == module or name.startswith(f"{module}.")}
    mistaken = any(getattr(part, "batch_first", None) is False for part in flight.model.modules())
    return not mistaken and rows != tokens and rows in inside.values() and tokens in keys_seen.values()


def _sizes(flight: Flight) -> tuple[int, int]:
    stream = flight.batch.stream()
    return flight.batch.sizes(stream) if stream is not None else (flight.batch.rows, 0)


def _why_rows(flight: Flight, module: str, keys_seen: dict[str, int]) -> tuple[str, str]:
    inside = dict(flight.model.named_modules())[module]
    rows, tokens = _sizes(flight)
    over = next((n for name, n in keys_seen.items() if name == module or name.startswith(f"{module}.")), None)
    mistaken = getattr(inside, "batch_first", None) is False
    if mistaken or (over == rows and over != tokens):
        why = f"Attention runs over the batch axis: it sees {rows} keys, one for each row, and no other token. "
        if not mistaken:
            advice = "Transpose before and after. If rows are meant to mix (tables), pass independent=False."
            return why + "Axes are in another order than the attention reads them.", advice
        why += "The module has batch_first=False: it reads (tokens, batch, width) and was given (batch, tokens, width)."
        advice = (
            "Pass batch_first=True, or transpose before and after. If the batch is meant to be (tokens, batch, …), "
        )
        return why, advice + "call preflight(..., sequence_first=True)."
    kind = type(inside).__name__
    if "Norm" in kind:
        return f"{kind} takes its statistics over the batch, in evaluation mode too.", "Use running statistics in eval."
    if any(word in f"{kind} {module}".lower() for word in ("moe", "expert", "router", "gate")):
        why = "The experts' routing depends on the other rows: a capacity, or a sort over the batch, drops or moves "
        return why + "tokens of one row because of another.", "Raise the capacity in evaluation, or route row by row."
    why = "One row of the batch changes the results of others: an axis is mistaken (a view without a transpose, a mask "
    return (
        why + "or a softmax over the batch, a sum over axis 0).",
        "Look at the reshapes and axes in this module; if rows are meant to mix, pass independent=False.",
    )
