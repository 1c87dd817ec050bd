"""levelhead's own operations under JAX's usual rules of promotion, whatever a program has set for its own.

`jax_numpy_dtype_promotion="strict"` and `jax_numpy_rank_promotion="raise"` find mistakes in the code that sets them;
the formulas here are shared with NumPy and mix integers with numbers and ranks with ranks on purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")


def usual_promotion(function: Callable[P, R]) -> Callable[P, R]:
    """The function, traced or run under the usual rules. What JAX calls later, as rules of gradients, needs its own."""

    @wraps(function)
    def run(*args: P.args, **keywords: P.kwargs) -> R:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return function(*args, **keywords)

    return run
