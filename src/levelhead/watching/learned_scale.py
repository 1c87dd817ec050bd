"""Whether the scale in force is a learned parameter, such as a temperature per head.

Parameters with one number, or one per head, are compared with the scale: as they are, or through the functions that
models put around a temperature (exp, softplus, sigmoid, a square), times or divided by a power of √d_k. What agrees to
half a percent is the scale's parameter. Nothing is decided by names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

_SAME = 5e-3  # apart at most, relative: what is left of bfloat16
_FUNCTIONS = (lambda v: v, np.exp, np.square, lambda v: np.log1p(np.exp(v)), lambda v: 1.0 / (1.0 + np.exp(-v)))


def candidates(module: nn.Module, around: Iterable[nn.Module], heads: int) -> dict[str, nn.Parameter]:
    """By name: parameters that learn, with one number or one per head, in a module or directly in those around it."""
    own = dict(module.named_parameters())
    for outer in around:
        own |= {f"{type(outer).__name__}.{name}": p for name, p in outer.named_parameters(recurse=False)}
    return {
        name: p
        for name, p in own.items()
        if type(p) is nn.Parameter and p.numel() in (1, heads) and p.requires_grad and not name.endswith("bias")
    }


def name_of(values: Mapping[str, Tensor], scales: Iterable[float], d_k: int) -> str:
    """The parameter that gives these scales of heads; "": none does."""
    wanted = np.array(list(scales), np.float64)
    root = np.sqrt(max(d_k, 1))
    for name, value in values.items():
        v: Any = value.detach().to("cpu").double().flatten().numpy()
        with np.errstate(all="ignore"):
            for function in _FUNCTIONS:
                made = np.abs(function(v))
                for tried in (made * root**power for power in (0, -1, -2, 1)):
                    for each in (tried, 1.0 / tried):
                        if bool((np.abs(each / wanted - 1) < _SAME).all()):
                            return name
    return ""
