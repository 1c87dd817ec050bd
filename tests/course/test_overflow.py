"""What the chapter on overflow says about the division: after the product it comes too late, before it makes room."""

from __future__ import annotations

import math

import numpy as np

from levelhead.course.chapters import overflow

LIMIT = float(np.finfo(np.float16).max)


def test_the_division_makes_room_only_before_the_product() -> None:
    d_k, divisor = overflow.D_K, np.float16(math.isqrt(overflow.D_K))
    with np.errstate(over="ignore"):
        for score, fits in (
            (2 * LIMIT, True),
            (0.99 * float(divisor) * LIMIT, True),
            (1.01 * float(divisor) * LIMIT, False),
        ):
            q = k = np.full(d_k, math.sqrt(score / d_k), np.float16)
            undivided = np.float16(np.dot(q.astype(np.float32), k.astype(np.float32)))  # a score is kept in float16
            assert np.isinf(undivided) and np.isinf(undivided / divisor)
            first = np.float16(np.dot((q / divisor).astype(np.float32), k.astype(np.float32)))
            assert np.isfinite(first) == fits
