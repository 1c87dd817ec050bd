"""The states of all query rows of a call on a device, without values: by the Triton kernel, or by plain torch.

For `levelhead.torch.observed_attention`, whose values another kernel multiplies. Numbers of a mask hide a key where
they are -inf, as in `levelhead.observe`; a watch has a wider rule.
"""

from __future__ import annotations

import torch
from torch import Tensor

from levelhead.call.options import Scoring
from levelhead.device.attempt import attempted
from levelhead.device.choice import TRITON
from levelhead.torch.observed_operators import path_of_states
from levelhead.watching.described import Call
from levelhead.watching.rows_by_torch import states_by_torch


def row_states(
    q: Tensor, k: Tensor, scoring: Scoring, first_keys: Tensor | None, start: int | None
) -> tuple[Tensor, Tensor]:
    """Sums (B, H, T, 8) and counts (B, H, T, 2) of q (B, H, T, D) and k (B, G, S, D). `first_keys` (B, T): of each
    row's segment; `start`: the first query's position, where it is known without reading `scoring.query_start`."""

    def launch() -> tuple[Tensor, Tensor]:
        from levelhead.device.operator import observe

        return observe(q, k, scoring, None, first_keys)

    with torch.autocast(q.device.type, enabled=False):  # statistics must not be rounded
        if path_of_states(q, k) == TRITON and (found := attempted(launch, q)) is not None:
            return found
        call = Call(q, k, scoring, start=start)
        return states_by_torch(call, torch.arange(q.shape[2], device=q.device), first_keys, q.shape[2])
