"""What the pure wheel has as `levelhead._core`: the functions of `_core.pyi`, computed by NumPy."""

from levelhead.numpy_core.backward import backward
from levelhead.numpy_core.forward import exponential, fast_attention, finish, forward, merge, register_torch
from levelhead.numpy_core.machine import burn, default_threads, info, set_isa, sweep

__all__ = [
    "backward",
    "burn",
    "default_threads",
    "exponential",
    "fast_attention",
    "finish",
    "forward",
    "info",
    "merge",
    "register_torch",
    "set_isa",
    "sweep",
]
