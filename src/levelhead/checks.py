"""Checks of user arguments: flags, numbers, integers and arrays of them.

Each returns the value in one normal form or raises an error with the argument's name. What a value means is decided in
`call.scaling` and `call.scoring`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead.errors import LevelheadTypeError, LevelheadValueError, expected


def told(value: object) -> str:
    """The value, short enough for a message."""
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    text = repr(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    return f"{text} of type {type(value).__name__}"


def flag(argument: str, value: object) -> bool:
    """A Python or NumPy bool; an int or None is more likely a mistake than a flag."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    message = expected(argument, "True or False", told(value), "Pass a bool")
    raise LevelheadTypeError(message)


def reals(argument: str, value: object, what: str, advice: str) -> NDArray[np.float64]:
    """Real numbers of any shape as float64; bools are not numbers here."""
    array = as_array(argument, value, what, advice)
    # an empty list is float64 to NumPy, and ml_dtypes' bfloat16 is of kind "V"
    if array.dtype.kind not in "iuf" and array.dtype.name != "bfloat16":
        raise LevelheadTypeError(expected(argument, what, told(value), advice))
    return array.astype(np.float64)


def number(argument: str, value: object, what: str, advice: str) -> float:
    """A finite real number."""
    array = reals(argument, value, what, advice)
    if array.ndim != 0:
        raise LevelheadTypeError(expected(argument, what, told(value), advice))
    result = float(array)
    if not math.isfinite(result):
        raise LevelheadValueError(expected(argument, what, result, advice))
    return result


def integer(argument: str, value: object, what: str, advice: str) -> int:
    """A whole number given as an integer type."""
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return int(value)
    array = as_array(argument, value, what, advice)
    if array.ndim == 0 and array.dtype.kind in "iu":
        return int(array)
    raise LevelheadTypeError(expected(argument, what, told(value), advice))


def per_head(argument: str, value: object, heads: int, what: str, advice: str) -> NDArray[np.float64]:
    """float64 of shape (H,), one number per query head."""
    array = reals(argument, value, what, advice)
    if array.shape != (heads,):
        given = f"shape {array.shape}"
        raise LevelheadValueError(expected(argument, f"{what} of shape ({heads},)", given, advice))
    return array


def integers(argument: str, value: object, shape: tuple[int, ...], what: str, advice: str) -> NDArray[np.int64]:
    """int64, broadcast to `shape` (a read-only view)."""
    array = as_array(argument, value, what, advice)
    if array.dtype.kind not in "iu" and array.size:
        raise LevelheadTypeError(expected(argument, what, told(value), advice))
    if array.dtype == np.uint64 and array.size and int(array.max()) >= 2**63:
        given = f"a value of {int(array.max())}"
        raise LevelheadValueError(expected(argument, f"{what} below 2**63", given, advice))
    return np.broadcast_to(_fit(argument, array, shape, what, advice).astype(np.int64), shape)


def _fit(argument: str, array: NDArray[Any], shape: tuple[int, ...], what: str, advice: str) -> NDArray[Any]:
    """`array` itself, once it is known to broadcast to `shape`."""
    sizes = zip(reversed(array.shape), reversed(shape), strict=False)
    if array.ndim > len(shape) or any(n not in (1, full) for n, full in sizes):
        wanted = f"{what} that broadcast to {shape}"
        raise LevelheadValueError(expected(argument, wanted, f"shape {array.shape}", advice))
    return array


def broadcast(argument: str, array: NDArray[Any], shape: tuple[int, ...], what: str, advice: str) -> NDArray[Any]:
    """A view of `array` with `shape`; nothing is copied."""
    return np.broadcast_to(_fit(argument, array, shape, what, advice), shape)


def as_array(argument: str, value: object, what: str, advice: str) -> NDArray[Any]:
    """`value` as NumPy sees it; no copy of what already is an array."""
    if value is None or isinstance(value, str | bytes):
        raise LevelheadTypeError(expected(argument, what, told(value), advice))
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        # ragged lists, and arrays of other libraries that NumPy cannot convert
        message = expected(argument, what, told(value), advice)
    raise LevelheadTypeError(message)
