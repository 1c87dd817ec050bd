"""How many operations the operators count for, in PyTorch's `FlopCounterMode`: its own rule for attention, where every
key counts for every query, hidden ones too."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
from torch.utils.flop_counter import register_flop_formula

from levelhead.torch import operators as operators  # defines what is counted

Sizes: TypeAlias = tuple[int, ...]


def _products(q: Sizes, k: Sizes, widths: int) -> int:
    """Products of all queries with all keys, over so many columns; two operations each."""
    return 2 * math.prod(q[:-1]) * k[-2] * widths


def _forward(q: Sizes, k: Sizes, v: Sizes, *options: Any, **result: Any) -> int:
    return _products(q, k, q[-1] + v[-1])


def _backward(dout: Sizes, dlogsumexp: Any, q: Sizes, k: Sizes, v: Sizes, *options: Any, **result: Any) -> int:
    """Scores once more, dq and dk; dv and the gradient of the weights."""
    return _products(q, k, 3 * q[-1] + 2 * v[-1])


register_flop_formula(torch.ops.levelhead.attend)(_forward)
register_flop_formula(torch.ops.levelhead.attend_backward)(_backward)
