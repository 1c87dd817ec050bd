"""The rules by which a number hides a key: one for computing, a wider one for statistics.

`hides` is the rule of whatever computes attention: only the lowest numbers of a type, which are -inf in all but name.
Statistics must also know the finite stand-ins for -inf that models write, such as -1e4 or -1e9, be it in a mask or in
logits to which it was added: `hiding` finds them by the gap above them. No result of a model depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

# A number above this is a bias or a logit, however lonely. Models write -1e4 and below; healthy logits end before 100,
# those of heads without a scale near 1000.
FLOOR = -5000.0
# exp(-88) is below the smallest normal float32: such a weight is zero in every type but float64.
UNDERFLOW = 88.0
_AT_A_TIME = 1 << 24  # numbers: 64 MiB of float32
_STEPS = 24  # each at least doubles the floor, where numbers reach it without a gap; nearly always one is enough
STEPS_UNREAD = 4  # where no step can be read, so all are made


def hides(mask: Tensor, below: Tensor | None = None) -> Tensor:
    """Where an additive mask hides a key. Models write the lowest number of a type instead of -inf, and masks are made
    in one type, added up and cast to another: half of the lowest number hides, too. `below`: what `hiding` found, for
    statistics."""
    return mask <= limit(mask, below)


def limit(mask: Tensor, below: Tensor | None) -> Tensor | float:
    """The largest number that hides by either rule."""
    lowest: float = torch.finfo(mask.dtype).min / 2
    return lowest if below is None else below.clamp(min=lowest)


def hiding(values: Tensor, reach: Tensor | float = 0.0, *, wait: bool = True) -> Tensor:
    """The largest number that hides a key, among those of an additive mask or of ready-made logits; a scalar, -inf
    where no finite number does.

    Numbers hide that are at most -5000 and lie below a gap: nothing lies in it, and it is as wide as the spread of all
    numbers above it, and wide enough for a weight of zero whatever the logits. So ALiBi's slopes, which reach -5000
    without a gap, hide nothing, and neither do logits that spread over thousands.

    Args:
        values: of the whole call; NaN and +inf are passed over.
        reach: how far the logits lie from 0 to which the numbers are added; 0: the numbers are the logits.
        wait: read results on the way, for which another device would be waited for.
    """
    found = torch.full((), -math.inf, dtype=torch.float64, device=values.device)
    floor = torch.full_like(found, FLOOR)
    done = torch.zeros_like(found, dtype=torch.bool)
    for _ in range(_STEPS if wait else STEPS_UNREAD):
        top, low, next_lower = _around(values, floor)
        gap = low - next_lower
        wide = (gap >= top - low) & (gap >= UNDERFLOW + 2 * reach) & (next_lower > -math.inf)
        found = torch.where(wide & ~done, next_lower, found)
        done = done | wide | (next_lower == -math.inf)
        if wait and bool(done):
            break
        floor = torch.where(done, floor, 2 * next_lower)
    return found


def _around(values: Tensor, floor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The largest and the smallest number above `floor`, and the largest finite one at or below it. Without a number
    above it: zeros, as a mask that hides nothing has them."""
    tops, lows, below = [], [], []
    for piece in _pieces(values):
        above = piece > floor
        tops.append(torch.where(above & (piece < math.inf), piece, -math.inf).amax())
        lows.append(torch.where(above, piece, math.inf).amin())
        below.append(torch.where(piece <= floor, piece, -math.inf).amax())
    if not tops:
        return torch.zeros_like(floor), torch.zeros_like(floor), torch.full_like(floor, -math.inf)
    top, low, next_lower = (torch.stack(x).double() for x in (tops, lows, below))
    top, low = top.amax(), low.amin()
    empty = top == -math.inf
    return torch.where(empty, 0.0, top), torch.where(empty, 0.0, low), next_lower.amax()


def _pieces(values: Tensor) -> Iterator[Tensor]:
    """All numbers once, some at a time: a dimension that was stretched counts once."""
    for d, (size, stride) in enumerate(zip(values.shape, values.stride(), strict=True)):
        if stride == 0 and size > 1:
            values = values.narrow(d, 0, 1)
    if values.numel() == 0:
        return
    if values.numel() <= _AT_A_TIME or values.dim() < 2:
        yield values
        return
    longest = max(range(values.dim() - 1), key=lambda d: values.shape[d])
    yield from torch.split(values, max(1, _AT_A_TIME * values.shape[longest] // values.numel()), longest)
