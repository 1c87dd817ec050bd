"""Passes that do not count: those that only learn shapes, and those that run again in the backward pass.

torch's pipelining runs every stage once before the first micro-batch, to learn shapes. The first stage gets a batch
then, which runs again later. All others get memory that nothing was written to: numbers of any size, or NaN. Nothing
marks such a pass but the function that makes it.
"""

from __future__ import annotations

import sys
from types import FrameType

import torch

_LIBRARY = "torch.distributed.pipelining.stage"
_INFER = ("_forward_metadata_inference", "_shape_inference")  # the second in older versions


def infers_shapes() -> bool:
    """Whether such a pass runs in this thread."""
    if _LIBRARY not in sys.modules:
        return False
    at: FrameType | None = sys._getframe(1)
    while at is not None:
        if at.f_code.co_name in _INFER and at.f_globals.get("__name__") == _LIBRARY:
            return True
        at = at.f_back
    return False


def in_backward() -> bool:
    """Whether backward is running: a forward inside it is recomputed (checkpointing)."""
    return bool(torch._C._current_graph_task_id() != -1)
