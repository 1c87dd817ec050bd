"""Rounding to float16, bfloat16 and float32, as a naive softmax in these types does it.

Results are float32 that hold the narrower type's values, so that no package is needed for bfloat16. The lab compares
the core with this; the core rounds for itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead.call.halves import as_bfloat16, as_float32

LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38}


def rounded(x: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """x to the nearest number of the type, ties to even; beyond the largest is infinite."""
    single = np.asarray(x, np.float32)
    if dtype == "float32":
        return single
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return single.astype(np.float16).astype(np.float32)
    return as_float32(as_bfloat16(single))
