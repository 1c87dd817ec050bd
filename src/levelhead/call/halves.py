"""Half types as float32, and back: bfloat16 is passed around as its bits, which are the upper half of a float32."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]


def as_float32(x: Array) -> Array:
    """Half types in float32, exactly; bfloat16 comes as its bits, the upper half of a float32."""
    bits = x.dtype == np.uint16
    return (x.astype(np.uint32) << 16).view(np.float32) if bits else x.astype(np.float32, copy=False)


def as_bfloat16(x: Array) -> Array:
    """float32 rounded to bfloat16, ties to even, as its bits."""
    bits = x.view(np.uint32)
    rounded: Array = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)
