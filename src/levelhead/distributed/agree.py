"""Before any work, every rank sends a summary of its call to all others.

One small tensor of int64 per call. A difference in what must be the same is an error on every rank, since all of them
compare the same table; so is an argument that one rank rejected. The errors name the ranks.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from levelhead.distributed.wire import Wire
from levelhead.errors import LevelheadError, bad_value

Table: TypeAlias = list[dict[str, int]]  # each rank's message, by name

_NUMBERS = 48  # of every message, so that ranks in different calls can still exchange them
_SHOWN = 2**31  # larger values are hashes, which errors do not print
_ROUNDING = 1e-3  # relative to the sum of magnitudes: far above float32's rounding, far below a mistake

_calls: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def next_call(wire: Wire) -> int:
    """The number of this call in its group, so that ranks out of step are detected."""
    _calls[wire.group] = _calls.get(wire.group, 0) + 1
    return _calls[wire.group]


def mark(*parts: Any) -> int:
    """A hash that is equal on two ranks when the parts are."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def bits(x: float) -> int:
    """The bits of a float64 as an int64; `number` is the inverse."""
    return int(struct.unpack("<q", struct.pack("<d", x))[0])


def number(x: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", x))[0])


def agree(
    wire: Wire,
    what: str,
    same: Mapping[str, int],
    own: Mapping[str, int],
    refusal: LevelheadError | None = None,
    about: str = "arguments",
) -> Table:
    """Every rank's message; an error on all ranks unless everything in `same` is the same.

    Args:
        what: the step that all ranks must be in; its name is sent as a hash.
        refusal: why this rank cannot continue; raised here after the others received it.
        about: the subject of a refusal, for the error on the other ranks.
    """
    numbers = [int(refusal is not None), mark(what), *same.values(), *own.values()]
    heard = _exchanged(wire, numbers + [0] * (_NUMBERS - len(numbers)), what)
    if refusal is not None:
        raise refusal
    refused = [rank for rank, row in enumerate(heard) if row[0]]
    if refused:
        raise bad_value(about, "no complaint on any rank", f"an error on ranks {refused}", "Its own error says why")
    _alike("step", [row[1] for row in heard], f"the ranks are not all in {what}")
    names = ["refused", "step", *same, *own]
    table = [dict(zip(names, row, strict=False)) for row in heard]
    for name in same:
        _alike(name, [row[name] for row in table], "Give every rank the same")
    return table


def agree_about(wire: Wire, name: str, x: Tensor, advice: str) -> None:
    """An error unless the tensors that ranks computed for themselves have the same sum, up to rounding."""
    x = x.to(torch.float64)
    sums = [bits(float(x.sum())), bits(float(x.abs().sum()))]
    heard = [tuple(map(number, row)) for row in _exchanged(wire, sums, name)]
    first, first_size = heard[0]
    for rank, (total, size) in enumerate(heard):
        if not abs(total - first) <= _ROUNDING * max(size, first_size) and total == total:
            raise bad_value(name, "the same on every rank", f"another on rank {rank} than on rank 0", advice)


def _exchanged(wire: Wire, numbers: list[int], what: str) -> list[list[int]]:
    message = torch.tensor(numbers, dtype=torch.int64)
    return [row.tolist() for row in wire.hear(message, f"agreeing on {what}")]


def _alike(name: str, values: Sequence[int], advice: str) -> None:
    if len(set(values)) == 1:
        return
    by_value: dict[int, list[int]] = {}
    for rank, value in enumerate(values):
        by_value.setdefault(value, []).append(rank)
    values_with_ranks = [
        f"{value if abs(value) < _SHOWN else 'one' if i == 0 else 'another'} on ranks {ranks}"
        for i, (value, ranks) in enumerate(by_value.items())
    ]
    raise bad_value(name, "the same on every rank", ", ".join(values_with_ranks), advice)
