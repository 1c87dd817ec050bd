"""Checks of user arguments: flags, paths, numbers, integers and arrays of them.

Each returns the value in one normal form or raises an error with the argument's name.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead.errors import bad_type, bad_value


def short_repr(value: object) -> str:
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
    raise bad_type(argument, "True or False", short_repr(value), "Pass a bool")


def path(argument: str, value: object) -> Path:
    """The name of a file or a directory, there or not."""
    what, advice = "a path", "Pass a str or a pathlib.Path"
    name = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(name, str):
        raise bad_type(argument, what, short_repr(value), advice)
    if not name or "\0" in name:
        raise bad_value(argument, what, repr(name), advice)
    return Path(name)


def reals(argument: str, value: object, what: str, advice: str) -> NDArray[np.float64]:
    """Real numbers of any shape as float64; bools are not numbers here."""
    array = as_array(argument, value, what, advice)
    # an empty list is float64 to NumPy, and ml_dtypes' bfloat16 is of kind "V"
    if array.dtype.kind not in "iuf" and array.dtype.name != "bfloat16":
        raise bad_type(argument, what, short_repr(value), advice)
    return array.astype(np.float64)


def number(
    argument: str, value: object, what: str, advice: str, accepts: Callable[[float], bool] = math.isfinite
) -> float:
    """A finite real number that `accepts` finds in range."""
    if type(value) is float:  # the usual case, without an array
        result = value
    else:
        array = reals(argument, value, what, advice)
        if array.ndim != 0:
            raise bad_type(argument, what, short_repr(value), advice)
        result = float(array)
    if not (math.isfinite(result) and accepts(result)):
        raise bad_value(argument, what, result, advice)
    return result


def integer(argument: str, value: object, what: str, advice: str, accepts: Callable[[int], bool] | None = None) -> int:
    """A whole number given as an integer type, in the range that `accepts` states."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        array = as_array(argument, value, what, advice)
        if array.ndim != 0 or array.dtype.kind not in "iu":
            raise bad_type(argument, what, short_repr(value), advice)
        value = array
    result = int(value)
    if accepts is not None and not accepts(result):
        raise bad_value(argument, what, result, advice)
    return result


def per_head(argument: str, value: object, heads: int, what: str, advice: str) -> NDArray[np.float64]:
    """float64 of shape (H,), one number per query head."""
    array = reals(argument, value, what, advice)
    if array.shape != (heads,):
        raise bad_value(argument, f"{what} of shape ({heads},)", f"shape {array.shape}", advice)
    return array


def integers(argument: str, value: object, shape: tuple[int, ...], what: str, advice: str) -> NDArray[np.int64]:
    """int64, broadcast to `shape` (a read-only view)."""
    array = as_array(argument, value, what, advice)
    if array.dtype.kind not in "iu" and array.size:
        raise bad_type(argument, what, short_repr(value), advice)
    if array.dtype == np.uint64 and array.size and int(array.max()) >= 2**63:
        raise bad_value(argument, f"{what} below 2**63", f"a value of {int(array.max())}", advice)
    return broadcast(argument, array.astype(np.int64), shape, what, advice)


def broadcast(argument: str, array: NDArray[Any], shape: tuple[int, ...], what: str, advice: str) -> NDArray[Any]:
    """A view of `array` with `shape`; nothing is copied."""
    sizes = zip(reversed(array.shape), reversed(shape), strict=False)
    if array.ndim > len(shape) or any(n not in (1, full) for n, full in sizes):
        raise bad_value(argument, f"{what} that broadcast to {shape}", f"shape {array.shape}", advice)
    return np.broadcast_to(array, shape)


def refuse_any(argument: str, refused: NDArray[Any], what: str, advice: str) -> None:
    """Raises an error with the first of the refused values, if there is one."""
    if refused.size:
        raise bad_value(argument, what, refused[0], advice)


def as_array(argument: str, value: object, what: str, advice: str) -> NDArray[Any]:
    """`value` as NumPy sees it; no copy of what already is an array."""
    if value is not None and not isinstance(value, str | bytes):
        try:
            return np.asarray(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            pass  # ragged lists, and arrays of other libraries that NumPy cannot convert
    raise bad_type(argument, what, short_repr(value), advice)
