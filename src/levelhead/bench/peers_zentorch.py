"""zentorch as a peer: AMD's attention for PyTorch on its own CPUs, called as the eager operator that it registers.

It runs on PyTorch's threads. Importing it changes nothing that the other peers call.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from levelhead.bench.calls import Call, Refused, Variants
from levelhead.bench.inputs import Problem
from levelhead.bench.peers_torch import call, tensor


def variants(problem: Problem, threads: int) -> Variants:
    case = problem.case
    if case.softcap is not None:
        raise Refused("zentorch_sdpa has no soft cap")
    if case.D != case.E:
        raise Refused("zentorch_sdpa wants keys and values of one width")
    return {"zentorch_sdpa": partial(_sdpa, problem)}


def _sdpa(problem: Problem) -> Call:
    import torch
    import zentorch  # noqa: F401  # registers the operator

    operator, options = torch.ops.zentorch.zentorch_sdpa, _masking(problem)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return operator(q, k, v, **options)[0]

    return call(problem, attend)


def _masking(problem: Problem) -> dict[str, Any]:
    """Its masks are numbers, never booleans."""
    if problem.case.only_causal:
        return {"is_causal": True}
    return {} if problem.bias is None else {"attn_mask": tensor(problem.bias)}
