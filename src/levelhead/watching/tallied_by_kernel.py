"""The tally of a call's heads by the Triton kernels: a pass over q and k on their device, and one over the rows.

Where a kernel cannot be compiled or launched, that is said once, and plain torch serves such calls from then on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from levelhead.device.attempt import attempted
from levelhead.runs import tally
from levelhead.torch.masks import limit
from levelhead.watching.described import Call


def serves(call: Call) -> bool:
    """Functions of scores are evaluated by plain torch, and float64 is computed by it."""
    wide = torch.float64 in (call.q.dtype, call.k.dtype)
    some = call.q.numel() > 0 and call.k.numel() > 0
    return some and not wide and call.score_mod is None and call.mask_mod is None


def tallied_by_kernel(
    call: Call, rows: Tensor | None, used: Tensor | None, first: Tensor | None, below: Tensor | None
) -> Tensor | None:
    """The tally (H, columns) of a call's rows at these places (None: all), without q and k; None: the kernels cannot
    run here. `used` and `first` (B, R): which rows count, and their first keys; `below`: the largest number of the mask
    that hides a key."""
    hiding = below
    mask = call.scoring.mask
    if mask is not None and mask.dtype is not torch.bool:
        most = limit(mask, below)
        hiding = most if isinstance(most, Tensor) else torch.full((), most, device=mask.device)

    def launch() -> Tensor:
        from levelhead.device.operator import observe, tallied

        sums, counts = observe(call.q, call.k, call.scoring, rows, first, hiding)
        return _joined(tallied(sums, counts, call.scoring.sinks, used, rows))

    return attempted(launch, call.q)


def hiding_by_kernel(call: Call, mask: Tensor, reach: Tensor | float) -> Tensor | None:
    """`masks.hiding` of a call's mask of numbers, without waiting for the device; None: plain torch must find it."""
    if mask.dtype is torch.float64 or not mask.numel():
        return None

    def launch() -> Tensor:
        from levelhead.device.operator import hiding

        far = reach.double() if isinstance(reach, Tensor) else torch.full((), reach, device=mask.device).double()
        return hiding(mask, far)

    return attempted(launch, call.q)


def _joined(tallies: Tensor) -> Tensor:
    """(B, H, columns) as (H, columns): what `tally.merge` makes of them, at once."""
    if len(tallies) == 1:
        return tallies[0]
    highest, batch = tallies[..., tally.MAX].max(0)
    at = batch[:, :1]  # of the largest logit, the first of these columns
    place = tallies[..., tally.PLACE].gather(0, at[None].expand(1, -1, len(tally.PLACES)))[0]
    return torch.cat([tallies[..., tally.SUM].sum(0), tallies[..., tally.MIN].amin(0), highest, place], 1)
