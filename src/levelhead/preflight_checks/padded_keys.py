"""What attention calls do with padded keys, where real tokens stand still: pooling queries that see them, keys that are
zero and still get weight; and masks that are no padding masks."""

from __future__ import annotations

import torch
from torch import Tensor

from levelhead.errors import LevelheadError
from levelhead.preflight_checks.calls import SeenCall, seen_calls
from levelhead.preflight_checks.inputs import Batch, Key
from levelhead.preflight_checks.passes import Moved, run, same, taped, tensors
from levelhead.preflight_checks.places import Grid

_NEAR = 1e-3


def exposed(padded: Batch, changed: Batch, real: Tensor) -> Moved | None:
    """A call with other queries than tokens, such as the latents of a perceiver, that shows padded keys."""
    B, T = real.shape
    try:
        pairs = list(zip(seen_calls(padded)[1], seen_calls(changed)[1], strict=True))
    except (LevelheadError, ValueError):
        return None
    for old, new in pairs:
        if old.module != new.module or old.keys != T or old.queries == T or old.k.shape[0] != B or not old.whole:
            continue
        moved = (old.k != new.k).any(3).any(1).cpu()  # (B, S)
        hidden = old.hidden()
        if hidden is None or not bool(moved.any()) or bool((moved & real).any()):
            continue
        seen = ~hidden.transpose(1, 3).flatten(2).all(2).cpu()  # (B, S): by any query of any head
        if bool((seen & moved).any()) and _rows_move(padded, changed, (seen & moved).any(1)):
            return Moved(1.0, old.module, 1)
    return None


def _rows_move(padded: Batch, changed: Batch, rows: Tensor) -> bool:
    """Whether what the model gives for these rows moves."""
    pairs = zip(*(tensors(run(each)) for each in (padded, changed)), strict=False)
    return any(a.shape == b.shape and len(a) == len(rows) and not same(a[rows], b[rows]) for a, b in pairs if a.dim())


def pooled(padded: Batch, changed: Batch, real: Tensor) -> bool:
    """Whether an output (B, n) without a place for every token moves in a row with padding."""
    padding = ~real.all(1)
    pairs = zip(*(tensors(run(each)) for each in (padded, changed)), strict=False)
    fits = ((a, b) for a, b in pairs if a.shape == b.shape and a.dim() == 2 and len(a) == len(real) != a.shape[1])
    return any(a.shape[1] != real.shape[1] and not same(a[padding], b[padding]) for a, b in fits)


def counted(padded: Batch, stream: Key, real: Tensor) -> Moved | None:
    """A call of tokens that shows padded keys to real queries: what stands there was zeroed, and takes a share of the
    softmax. A row without its padding must give the same."""
    row = next((r for r in range(len(real)) if _ends_with_padding(real[r])), None)
    shorter = None if row is None else _cut(padded, stream, int(real[row].sum()))
    if row is None or shorter is None or len(padded.streams()) > 1:
        return None
    calls = [call for call in seen_calls(padded)[1] if call.square and call.keys == real.shape[1]]
    shown = [call.module for call in calls if _shows(call, row, real[row])]
    if not shown:
        return None
    try:
        whole, alone = taped(padded), taped(shorter)
    except LevelheadError:
        return None
    n, (B, T) = int(real[row].sum()), real.shape
    for a, b in zip(whole.outputs, alone.outputs, strict=False):
        x, y = Grid(B, T).by_token(a), Grid(B, n).by_token(b)
        if x is not None and y is not None and x.shape[2] == y.shape[2] and B not in (T, n):
            size = float((x[row, :n] - y[row]).abs().max()) / max(float(x.abs().max()), 1e-30)
            return Moved(size, shown[0], 1) if size > _NEAR else None
    return None


def _ends_with_padding(real: Tensor) -> bool:
    n = int(real.sum())
    return 1 < n < len(real) and bool(real[:n].all())


def _cut(batch: Batch, stream: Key, n: int) -> Batch | None:
    """The first tokens of every row; None: not all arguments can be cut."""
    size = batch.sizes(stream)
    given = batch.tensors()
    if batch.sequence_first or any(tuple(x.shape[:2]) != size for x in given.values()):
        return None
    return batch.with_({key: x[:, :n] for key, x in given.items()})


def _shows(call: SeenCall, row: int, real: Tensor) -> bool:
    hidden = call.hidden()
    if hidden is None or len(hidden) <= row:
        return False
    return not bool(hidden[row][:, real.to(hidden.device)][..., ~real.to(hidden.device)].all())


def used_otherwise(padded: Batch, key: Key, real: Tensor) -> bool:
    """Whether the mask hides no key in any call, and is read elsewhere: it gives padded places another content than
    zero, such as an embedding of the mask's number."""
    full = padded.with_({key: torch.full_like(padded[key], padded[key][real][0])})
    try:
        calls, others = seen_calls(padded)[1], seen_calls(full)[1]
        before, after = taped(full), taped(padded)
    except LevelheadError:
        return False
    hidden = [(a.hidden(), b.hidden()) for a, b in zip(calls, others, strict=False)]
    if any(a is None or b is None or a.shape != b.shape or not torch.equal(a, b) for a, b in hidden):
        return False
    places = Grid(*real.shape).at(~real)
    for name, old in before.entries.items():
        new = after.entries.get(name, old)
        for a, b in zip([*old.inputs, *old.outputs], [*new.inputs, *new.outputs], strict=False):
            x, y = (places(z) if a.shape == b.shape else None for z in (a, b))
            if x is not None and y is not None and not same(x, y):
                return bool(y.any())
    return False
