"""The scores of additive attention, Σ_a w_a tanh(x_a + y_a), and their gradients.

The core takes x and y times 2 log₂ e (`attention.h`), and gives gradients by x and y.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from levelhead import state
from levelhead.reference import wide

Array: TypeAlias = NDArray[Any]


def scores(q: Array, k: Array, weights: Array) -> Array:
    """(b, h, t, S) for queries (b, h, t, A) and keys (b, h, S, A)."""
    found: Array = _tanh(q, k) @ wide(weights)
    return found


def gradients(ds: Array, q: Array, k: Array, weights: Array) -> tuple[Array, Array, Array]:
    """By x, by y and by the weights, from the gradient by each score; a pair whose is 0 takes no part."""
    tanh = np.where((ds != 0)[..., None], _tanh(q, k), 0.0)
    slope = ds[..., None] * (1.0 - tanh * tanh) * wide(weights)
    return slope.sum(-2), slope.sum(-3), (ds[..., None] * tanh).sum((0, 1, 2, 3))


def _tanh(q: Array, k: Array) -> Array:
    x = wide(q)[..., :, None, :] + wide(k)[..., None, :, :]
    found: Array = np.tanh(x * (state.LN2 / 2))
    return found
