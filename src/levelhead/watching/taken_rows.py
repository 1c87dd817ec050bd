"""Which query rows of a call are measured, where not all are.

A sequence is cut into strata of equal size, which may begin within a row, and one point of each is drawn: the row it
lies in is taken, so that each row has the same chance. A point depends on the observed step, the call in it, the
sequence and the stratum, by a hash: points are as independent as random ones, nothing periodic in the data is favoured,
a resumed watch takes the rows that it would have taken, ranks agree, and no random number is drawn. Where a stratum is
no whole number of rows, a row may be taken twice. All is computed on the device, in one shape: nothing waits, and
nothing is compiled again.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from levelhead.runs import tally
from levelhead.runs.row_sample import ROWS
from levelhead.watching.described import Call

AUTO = "auto"
Rows: TypeAlias = int | Literal["auto"] | None

_GOLDEN, _STEP, _CALL = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35  # odd: no two numbers below 2³² become one
_MIX = ((16, 0x21F0AAAD), (15, 0x735A2D97))  # a 32-bit mixer; products stay below 2⁶³
_LAST = 15
_LOW = 0xFFFFFFFF
_WORTH = 1 << 18  # logits of a sequence: on a CPU they take about 1 ms, and taking rows of it 0.2 ms


class Wanted(Protocol):
    """What a watch says about rows."""

    rows: Rows
    every: int

    @property
    def turn(self) -> int: ...  # the number of the observed step


def taken(call: Call, watch: Wanted, number: int) -> Tensor | None:
    """The rows (B, n) to measure of a call, in ascending order; None: all. `number`: of the call in its step, so that
    the parts of an accumulated batch have rows of their own."""
    B, _, T, _ = call.q.shape
    n = watch.rows if not isinstance(watch.rows, str) else _enough(call) if watch.every == 1 else None
    return None if n is None or n >= T else places(B, T, n, watch.turn, call.q.device, number)


def _enough(call: Call) -> int | None:
    """How many of each sequence by the bound; None: all, where taking some would save too little to pay for itself."""
    (B, H, T, _), S = call.q.shape, call.k.shape[2]
    n = -(-ROWS // max(B, 1))
    return n if 2 * n <= T and H * T * S >= _WORTH else None


def stand_for(measured: Tensor, weights: tuple[float, ...]) -> Tensor:
    """The tally of measured rows as that of all rows of their call: other calls are added to it."""
    if weights:
        tally.weigh(measured, weights[0])
    return measured


def places(B: int, T: int, n: int, turn: int, device: torch.device, number: int = 0) -> Tensor:
    """One row of each of n strata, (B, n), of a call with this number in this step."""
    key = _mixed(_mixed(turn * _STEP & _LOW) + number * _CALL & _LOW)
    each = torch.arange(B * n, device=device).reshape(B, n)
    point: Any = _mixed(each * _GOLDEN + key & _LOW) * T >> 32  # of T, and a row has n of them: none is cut
    return torch.as_tensor((torch.arange(n, device=device) * T + point) // n)


def _mixed(x: Any) -> Any:
    """A number below 2³² by a number below 2³², one to one."""
    for shift, factor in _MIX:
        x = (x ^ (x >> shift)) * factor & _LOW
    return x ^ (x >> _LAST)
