"""The weights of attention, read off the core, which never forms them.

For values that are the identity, the output of attention is softmax(q kᵀ · scale) itself. This costs a value column per
key. Nothing here is a second implementation of attention.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead.attention import attention

Array = NDArray[Any]


def weights(q: Array, k: Array, scale: Any, *, together: int = 1, **options: Any) -> Array:
    """softmax(q kᵀ · scale), (…, T, S), under the options of `attention`.

    With `together`, so many neighbouring keys share a value column: the sum of their weights is one number.
    """
    keys = k.shape[-2]
    columns = np.eye(-(-keys // together), dtype=k.dtype)
    values = np.repeat(columns, together, axis=0)[:keys]
    values = np.broadcast_to(values, (*k.shape[:-2], *values.shape))
    return np.asarray(attention(q, k, values, scale=scale, **options))
