"""The statistics of every query row by the Triton kernel: one pass over q and k on their device.

Where the kernel cannot be compiled or launched, that is said once, and plain torch serves from then on.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from levelhead import stats
from levelhead.device import choice
from levelhead.errors import LevelheadError
from levelhead.watching.described import Call
from levelhead.watching.rows_by_torch import Fields, as_fields


def serves(call: Call) -> bool:
    """Functions of scores are evaluated by plain torch, and float64 is computed by it."""
    floats = (call.q.dtype, call.k.dtype)
    return call.score_mod is None and call.mask_mod is None and torch.float64 not in floats and min(call.k.shape) > 0


def rows_by_kernel(
    call: Call, rows: Tensor | None, used: Tensor | None, first: Tensor | None, below: Tensor | None
) -> Fields | None:
    """The fields of a call's rows at these places (None: all); None: the kernel cannot run here. `used` and `first`
    (B, R): which rows count, and their first keys; `below`: the largest number of the mask that hides a key."""
    hiding = below
    mask = call.scoring.mask
    if mask is not None and mask.dtype is not torch.bool:
        lowest = torch.finfo(mask.dtype).min / 2  # the rule of `masks.hides`
        hiding = torch.full((), lowest, device=mask.device) if below is None else below.clamp(min=lowest)
    try:
        from levelhead.device.operator import observe

        sums, counts = observe(call.q, call.k, call.scoring, rows, first, hiding)
    except (LevelheadError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a compiler is missing, a device is too old or too small: Triton has no one error
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        choice.failed(reason)
        words = "levelhead: statistics by plain torch, which is slower, because the Triton kernel failed"
        warnings.warn(f"{words} ({reason})", stacklevel=2)
        return None
    exists = None if used is None else used[:, None]
    return as_fields(stats.rows(sums.double(), counts, _sinks(call), exists), exists)


def _sinks(call: Call) -> Tensor | None:
    sinks = call.scoring.sinks
    return None if sinks is None else sinks.to(call.q.device, torch.float64)
