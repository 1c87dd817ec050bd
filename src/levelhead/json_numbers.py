"""Numbers and arrays as JSON values. JSON has no NaN and no infinities; the rules that replace them are named here.

Every format of levelhead chooses its rules once, and reads numbers back with `number_from_json`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np

# "null": NaN and infinities are null. "infinities as text": NaN is null, infinities are "inf" and "-inf". "text": also
# NaN is text, because null has another meaning there.
NotFinite: TypeAlias = Literal["null", "infinities as text", "text"]
_EXACT = 2**53  # integers below this are exact in a double


def json_number(
    x: float, *, not_finite: NotFinite = "null", digits: int | None = None, short: bool = False
) -> float | str | None:
    """One number, rounded to so many significant digits if they are given. With `short` a float without fraction is
    written as an integer, unless it is too large to be exact or is -0.0."""
    if not math.isfinite(x):
        if not_finite == "null" or (not_finite != "text" and math.isnan(x)):
            return None
        return str(float(x))
    if isinstance(x, int):
        return x
    if digits is not None:
        x = float(f"{x:.{digits}g}")
    if short and x == int(x) and abs(x) < _EXACT and (x != 0 or math.copysign(1, x) > 0):
        return int(x)
    return float(x)


def json_value(value: Any, *, not_finite: NotFinite = "null", digits: int | None = None) -> Any:
    """A value as JSON types, with its numbers as `json_number` gives them: dataclasses and mappings as objects, arrays,
    lists and tuples as lists. Raises TypeError for anything else."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return json_number(value, not_finite=not_finite, digits=digits)
    convert = partial(json_value, not_finite=not_finite, digits=digits)
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): convert(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [convert(x) for x in value]
    raise TypeError(f"JSON cannot hold a {type(value).__name__}")


def number_from_json(x: float | str | None) -> float:
    """The number that `json_number` wrote; null is NaN."""
    return math.nan if x is None else float(x)
