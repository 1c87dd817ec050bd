"""A launch of the Triton kernel that may fail: where it cannot run, that is said once, and it is not tried again."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from levelhead.device import choice
from levelhead.errors import LevelheadError

Result = TypeVar("Result")


def attempted(launch: Callable[[], Result], q: Tensor) -> Result | None:
    """What `launch` returns for a call with such queries; None: the kernel cannot be compiled or launched for it."""
    calls = f"{str(q.dtype).removeprefix('torch.')} of width {q.shape[3]}"
    if not choice.fits(calls):
        return None
    try:
        return launch()
    except (LevelheadError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a compiler is missing, a device is too old or too small: Triton has no one error
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        misfit = any(x.__name__ == "TritonError" for x in type(error).__mro__)  # OutOfResources, CompilationError
        choice.failed(reason, calls if misfit else None)
        words = f"statistics of {calls if misfit else 'all calls'} by plain torch, which is slower"
        warnings.warn(f"levelhead: {words}, because the Triton kernel failed ({reason})", stacklevel=3)
        return None
