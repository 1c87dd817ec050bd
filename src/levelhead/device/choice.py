"""Which path computes a watched call's statistics on a device, and why.

The core serves CPUs, the Triton kernel CUDA and ROCm where Triton is installed, plain torch operations the rest.
LEVELHEAD_OBSERVE=triton or torch chooses by hand; Triton on a CPU needs its interpreter (TRITON_INTERPRET=1).
A kernel that could not be compiled or launched is not tried again: for the type and width of that call where Triton
says that it does not fit, for all calls where it does not work at all. Nothing is imported here.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from levelhead.extras import installed

CORE, TRITON, TORCH = "core", "triton", "torch"
VARIABLE = "LEVELHEAD_OBSERVE"

_failures: list[str] = []
_misfits: dict[str, str] = {}  # type and width -> why


class PathChoice(NamedTuple):
    path: str  # CORE, TRITON or TORCH
    why: str


def choice(device: str) -> PathChoice:
    """For tensors on a device of this type."""
    wanted = os.environ.get(VARIABLE)
    default = _default(device)
    if wanted == TORCH:
        return PathChoice(TORCH, f"{VARIABLE}=torch is set")
    if wanted == TRITON and device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return _triton(f"{VARIABLE}=triton and TRITON_INTERPRET=1 are set")
    return default


def _default(device: str) -> PathChoice:
    if device == "cpu":
        return PathChoice(CORE, "the core reads CPU tensors")
    if device == "cuda":
        return _triton("one pass on CUDA and ROCm")
    return PathChoice(TORCH, f"no kernel for {device}")


def _triton(why: str) -> PathChoice:
    if not installed("triton"):
        return PathChoice(TORCH, "triton is not installed")
    if _failures:
        return PathChoice(TORCH, f"the Triton kernel failed: {_failures[0]}")
    but = "".join(f"; plain torch for {calls}: {reason}" for calls, reason in _misfits.items())
    return PathChoice(TRITON, why + but)


def failed(reason: str, calls: str | None = None) -> None:
    """The kernel cannot run here; from now on plain torch does: for such calls, or for all."""
    if calls is None:
        _failures.append(reason)
    else:
        _misfits[calls] = reason


def fits(calls: str) -> bool:
    """Whether the kernel did not fail for such calls."""
    return calls not in _misfits


def ignored() -> str | None:
    """Why LEVELHEAD_OBSERVE has no effect, if it is set in vain."""
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return None
    if wanted not in (TRITON, TORCH):
        return f"{VARIABLE}={wanted}: ignored, it is neither {TRITON} nor {TORCH}"
    if wanted == TRITON and os.environ.get("TRITON_INTERPRET") != "1":
        return f"{VARIABLE}={wanted}: ignored for CPU tensors, TRITON_INTERPRET=1 is not set"
    return None
