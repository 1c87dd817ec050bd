"""Before any work, every rank says what it is about to do, and everybody hears everybody.

One small tensor of int64 per call. What must be the same and is not is an error on every rank, as
all of them read the same table; so is an argument that one rank refused. The errors name the ranks.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch

from levelhead.distributed.wire import Wire
from levelhead.errors import LevelheadError, LevelheadValueError, expected

Table: TypeAlias = list[dict[str, int]]  # what each rank said, by name

_NUMBERS = 48  # of a message, whatever it says: ranks that mean different things can still talk
_SHOWN = 2**31  # larger values are marks, which tell nobody anything

_calls: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def next_call(wire: Wire) -> int:
    """How many calls this group has seen, so that ranks out of step are noticed."""
    _calls[wire.group] = _calls.get(wire.group, 0) + 1
    return _calls[wire.group]


def mark(*parts: Any) -> int:
    """A number that is the same on two ranks when the parts are."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def bits(x: float) -> int:
    """A float64 as an int64, and `number` back again."""
    found: int = struct.unpack("<q", struct.pack("<d", x))[0]
    return found


def number(x: int) -> float:
    found: float = struct.unpack("<d", struct.pack("<q", x))[0]
    return found


def agree(
    wire: Wire,
    what: str,
    same: Mapping[str, int],
    own: Mapping[str, int],
    refusal: LevelheadError | None = None,
    about: str = "arguments",
) -> Table:
    """What every rank said; an error on all of them unless everything in `same` is.

    Args:
        what: the step ranks must be in together; its name travels as a mark.
        refusal: why this rank cannot go on, raised here once the others know.
        about: what a refusal is about, for the others.
    """
    said = [int(refusal is not None), mark(what), *same.values(), *own.values()]
    message = torch.tensor(said + [0] * (_NUMBERS - len(said)), dtype=torch.int64)
    heard = [row.tolist() for row in wire.hear(message, f"agreeing on {what}")]
    if refusal is not None:
        raise refusal
    refused = [rank for rank, row in enumerate(heard) if row[0]]
    if refused:
        advice = "Its own error says why"
        given = f"an error on ranks {refused}"
        raise _differ(about, "no complaint on any rank", given, advice)
    _alike("step", [row[1] for row in heard], f"the ranks are not all in {what}")
    names = ["refused", "step", *same, *own]
    table = [dict(zip(names, row, strict=False)) for row in heard]
    for name in same:
        _alike(name, [row[name] for row in table], "give every rank the same")
    return table


def agree_about(wire: Wire, name: str, values: Sequence[float], advice: str) -> None:
    """That numbers which ranks computed for themselves are equal but for rounding."""
    heard = [list(map(number, row)) for row in _gathered(wire, list(map(bits, values)), name)]
    for rank, row in enumerate(heard):
        total, size = row[0], max(abs(row[1]), abs(heard[0][1]))
        if not abs(total - heard[0][0]) <= _ROUNDING * size and total == total:
            given = f"another on rank {rank} than on rank 0"
            raise _differ(name, "the same on every rank", given, advice)


_ROUNDING = 1e-3  # of the sum of magnitudes: far above float32's, far below a mistake's


def _gathered(wire: Wire, numbers: list[int], what: str) -> list[list[int]]:
    message = torch.tensor(numbers, dtype=torch.int64)
    return [row.tolist() for row in wire.hear(message, f"agreeing on {what}")]


def _alike(name: str, values: Sequence[int], advice: str) -> None:
    if len(set(values)) == 1:
        return
    by_value: dict[int, list[int]] = {}
    for rank, value in enumerate(values):
        by_value.setdefault(value, []).append(rank)
    told = [
        f"{value if abs(value) < _SHOWN else 'one' if i == 0 else 'another'} on ranks {ranks}"
        for i, (value, ranks) in enumerate(by_value.items())
    ]
    raise _differ(name, "the same on every rank", ", ".join(told), advice)


def _differ(name: str, wanted: str, given: str, advice: str) -> LevelheadValueError:
    return LevelheadValueError(expected(name, wanted, given, advice))
