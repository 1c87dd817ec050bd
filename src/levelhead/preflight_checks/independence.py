"""Checks that change the input: a token, a row, padding, or nothing at all, and see what moves.

Each finds the first module whose output moved where its inputs stood still.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from levelhead.diagnosis.findings import Finding
from levelhead.errors import LevelheadError
from levelhead.preflight_checks.calls import seen_calls
from levelhead.preflight_checks.inputs import Batch, Key
from levelhead.preflight_checks.operators import called
from levelhead.preflight_checks.passes import Moved, Tape, moved, taped
from levelhead.preflight_checks.places import Grid
from levelhead.preflight_checks.result import Check, finding


@dataclass
class Flight:
    """The model, its batch, and one pass of it that all others are compared with."""

    batch: Batch
    tape: Tape
    checks: list[Check] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def model(self) -> nn.Module:
        return self.batch.model

    def grid(self, key: Key) -> Grid:
        return Grid(*self.batch.sizes(key))

    def attempt(self, name: str, check: Callable[[], Any]) -> None:
        """Runs a check. One that a model does not stand, or that meets what it does not know, ends no pre-flight."""
        try:
            check()
        except Exception as error:
            self.unknown(name, "its input or values", f"a changed pass failed: {type(error).__name__}: {error}"[:300])

    def passed(self, name: str, changed: str, what: str) -> None:
        self.checks.append(Check(name, "passed", changed, what))

    def unknown(self, name: str, changed: str, why: str) -> None:
        self.checks.append(Check(name, "not judged", changed, why))

    def failed(self, name: str, changed: str, what: str, *found: Finding) -> None:
        self.checks.append(Check(name, "failed", changed, what, found[0].module if found else None))
        self.findings.extend(found)


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


# ---- dropout


def same_twice(flight: Flight) -> None:
    """Two passes in evaluation mode with other random numbers."""
    name, changed = "dropout off in eval", "the same batch twice, other random numbers"
    again = taped(flight.batch, seed=1)
    for key, old in flight.tape.entries.items():
        new = again.entries.get(key)
        if new is None or all(_same(a, b) for a, b in zip(old.outputs, new.outputs, strict=False)):
            continue
        if not all(_same(a, b) for a, b in zip(old.inputs, new.inputs, strict=False)):
            continue
        module, size = key[0], _differs(old.outputs, new.outputs)
        why = "Two passes in evaluation mode differ: something random runs there, most often dropout whose p is passed "
        why += "to a function (F.dropout, dropout_p=) without looking at self.training."
        advice = "Write p if self.training else 0.0, or use nn.Dropout and call model.eval()."
        ran = called(flight.batch)
        if ran is not None and not ran.drops:
            what = f"outputs of {module} moved by {size:.2g}: it draws numbers, and not as dropout does"
            return flight.unknown(name, changed, what)
        found = finding("dropout in eval", "warning", module, why, advice, change=size)
        return flight.failed(name, changed, f"outputs moved by {size:.2g}", found)
    return flight.passed(name, changed, "every module gave the same bits")


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


def _differs(old: list[torch.Tensor], new: list[torch.Tensor]) -> float:
    pairs = [(a, b) for a, b in zip(old, new, strict=False) if a.shape == b.shape]
    return max((float((a.double() - b.double()).nan_to_num().abs().max()) for a, b in pairs), default=0.0)


# ---- numbers


def finite(flight: Flight) -> None:
    """Looks for NaN in what modules give for real tokens."""
    name, looked = "finite outputs", "what every module gives"
    stream, mask = flight.batch.stream(), flight.batch.padding_mask()
    if stream is not None and mask is not None:
        return flight.unknown(name, looked, "rows of padding may be NaN; `not finite` is judged by the calls")
    for (module, _), entry in flight.tape.entries.items():
        bad = [x for x in entry.outputs if bool(x.isnan().any())]
        if bad and not any(bool(x.isnan().any()) for x in entry.inputs):
            why = "NaN comes out of this module, and none went in: a row whose keys are all hidden, a softmax along a "
            why += "wrong axis, or a product beyond its type."
            share = float(bad[0].isnan().double().mean())
            found = finding("NaN in outputs", "error", module, why, "Look at its mask and at its softmax.", share=share)
            return flight.failed(name, looked, f"NaN in {share:.0%} of an output", found)
    return flight.passed(name, looked, "no NaN")


# ---- rows


def batch_independence(flight: Flight, keys_seen: dict[str, int]) -> None:
    """Changes row 0 of every stream; the other rows must stand still. `keys_seen`: of each attention module."""
    name, changed = "batch independence", "row 0 of the batch"
    stream, rows = flight.batch.stream(), flight.batch.rows
    if rows < 2:
        return flight.unknown(name, changed, "the batch has one row, or its rows are not known; give at least two")
    if stream is not None and not flight.grid(stream).clear:
        return flight.unknown(name, changed, "there are as many rows as tokens; give another number of rows")
    here = _row(flight, stream, 0)
    if not here.compared:
        return flight.unknown(name, changed, "no output has a row for each row of the batch")
    if not here.size:
        return flight.passed(name, changed, "no other row moved")
    if not _confirmed(flight, stream):
        return flight.unknown(name, changed, "a size of the model is the number of rows; give another number of rows")
    module = here.module or ""
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


def _row(flight: Flight, stream: Key | None, row: int) -> Moved:
    batch = flight.batch
    if stream is None:
        key = next(k for k, x in batch.tensors().items() if x.is_floating_point() and x.dim() > 3)
        x = batch[key].clone()
        x[row] = x[row] + torch.randn_like(x[row]) * x.float().std().to(x)
        return moved(flight.tape, taped(batch.with_({key: x})), Grid(batch.rows, 0).other_rows(row))
    grid = flight.grid(stream)
    for key in batch.streams():
        each = Grid(*batch.sizes(key))
        if each.rows == grid.rows:
            chosen = torch.zeros(each.rows, each.tokens, dtype=torch.bool)
            chosen[row] = True
            batch = batch.changed(key, chosen)
    return moved(flight.tape, taped(batch), grid.other_rows(row))


def _why_rows(flight: Flight, module: str, keys_seen: dict[str, int]) -> tuple[str, str]:
    inside = dict(flight.model.named_modules())[module]
    stream = flight.batch.stream()
    rows, tokens = flight.batch.sizes(stream) if stream is not None else (flight.batch.rows, 0)
    over = next((n for name, n in keys_seen.items() if name == module or name.startswith(f"{module}.")), None)
    if getattr(inside, "batch_first", None) is False or (over == rows and over != tokens):
        why = f"Attention runs over the batch axis: it sees {rows} keys, one for each row, and no other token. "
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
    return why + "or a softmax over the batch, a sum over axis 0).", "Look at the reshapes and axes in this module."


# ---- order


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
    return any(not _same(a, b) for old, new in pairs for a, b in zip(old.outputs, new.outputs, strict=False))


# ---- padding


def padding(flight: Flight, attending: Collection[str]) -> None:
    """Changes padded tokens; the others must stand still. `attending`: modules that do."""
    name, batch = "padding independence", flight.batch
    stream, key = next(iter(batch.streams()), None), batch.padding_mask()
    made = False
    if stream is not None and key is None and (given := _with_mask(batch)) is not None:
        batch, key, made = given, "attention_mask", True
    if stream is None or key is None:
        return flight.unknown(name, "padded tokens", "the batch has no padding mask (B, T)")
    grid = Grid(*batch.sizes(stream))
    if grid.tokens < 4 or not grid.clear:
        return flight.unknown(name, "padded tokens", "too few tokens, or as many rows as tokens")
    results = []
    causal = any(check.name == "causality" and check.verdict == "passed" for check in flight.checks)
    for side, padded, real in _paddings(batch, key, grid, left=causal):
        try:
            before, after = taped(padded), taped(padded.changed(stream, ~real))
        except LevelheadError:
            continue
        here = moved(before, after, grid.at(real))
        if here.size and here.module and _hides(padded, here.module, real):
            what = (
                f"real tokens moved through {here.module}, whose softmax hides the padding: something else mixes tokens"
            )
            return flight.unknown(name, "the padded tokens", what)
        results.append((side, here))
    changed = "the padded tokens" + (", of a padding made here" if made else "")
    known = [(side, here) for side, here in results if here.compared]
    if not known:
        return flight.unknown(name, changed, "no output has a place for every token")
    by_polarity: dict[str, list[tuple[str, Moved]]] = {}
    for side, here in known:
        by_polarity.setdefault(side.rsplit(" ", 1)[-1], []).append((side, here))
    if any(all(not here.size for _, here in group) for group in by_polarity.values()):
        return flight.passed(name, changed, "no real token moved")
    side, here = max(next(iter(by_polarity.values())), key=lambda pair: pair[1].size)
    module = here.module or ""
    if module not in attending:
        what = f"real tokens moved through {module}, which does not attend: a convolution or pooling over tokens"
        return flight.unknown(name, changed, what)
    why = "Padded tokens change the outputs of real ones: the padding mask does not reach the softmax of this module, "
    why += "or has no effect there. Results then depend on what a row is padded with and how far."
    advice = "Hide padded keys before the softmax: a bool mask (B, 1, 1, S) for scaled_dot_product_attention."
    found = finding("padding not masked", "error", module, why, advice, change=here.size)
    return flight.failed(name, changed, f"real tokens moved by {here.size:.2g} of the largest output", found)


def _hides(batch: Batch, module: str, real: torch.Tensor) -> bool:
    """Whether all calls of a module hide all padded keys."""
    calls = [call for call in seen_calls(batch)[1] if call.module == module]
    hidden = [call.hidden() for call in calls if call.keys >= real.shape[1]]
    padded = ~real
    return bool(hidden) and all(
        x is not None and x.shape[0] == len(real) and bool(x.transpose(1, 3)[:, : real.shape[1]][padded].all())
        for x in hidden
    )


def _with_mask(batch: Batch) -> Batch | None:
    """For a Hugging Face model that takes an attention_mask and was given none."""
    ids = "input_ids"
    takes = "attention_mask" in inspect.signature(batch.model.forward).parameters
    if not hasattr(batch.model, "config") or not takes or ids not in batch.kwargs or "attention_mask" in batch.kwargs:
        return None
    mask = torch.ones_like(batch.kwargs[ids])
    return replace(
        batch,
        kwargs={**batch.kwargs, "attention_mask": mask},
        names={**batch.names, "attention_mask": "attention_mask"},
    )


def _paddings(batch: Batch, key: Key, grid: Grid, *, left: bool) -> Iterator[tuple[str, Batch, torch.Tensor]]:
    """Padded batches and which of their tokens are real: as given, or one made by the mask, for either meaning of 1.
    `left`: also at the beginning, as tokens of a causal model cannot see padding at the end."""
    mask = batch[key]
    flat = mask.bool()
    for meaning in ("keep", "hide"):
        if meaning == "hide" and batch.names[key].endswith("attention_mask"):
            continue
        real = flat if meaning == "keep" else ~flat
        if real.any(1).all() and not real.all():
            yield f"as given {meaning}", batch, real
        elif real.all():
            yield f"right {meaning}", *_made(batch, key, slice(grid.tokens - max(1, grid.tokens // 3), None), meaning)
        if left and real.any(1).all():
            yield f"left {meaning}", *_made(batch, key, slice(0, max(1, grid.tokens // 3)), meaning)


def _made(batch: Batch, key: Key, where: slice, meaning: str) -> tuple[Batch, torch.Tensor]:
    """The batch with padding in its last row only."""
    made = torch.ones_like(batch[key], dtype=torch.bool)
    made[-1, where] = False
    return batch.with_({key: (made if meaning == "keep" else ~made).to(batch[key].dtype)}), made
