"""The parameters of an experiment: the quick or the full ones, with a user's changes; and checks of their values.

A change must name a parameter of a chosen claim and have its type. Its range is checked by the claim, with the
functions below.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from levelhead.errors import LevelheadValueError, bad_value
from levelhead.lab.claim import Claim, Params


def applied(claims: Sequence[Claim], changes: Params, *, full: bool) -> Mapping[str, Params]:
    """Parameters by the claim's id."""
    chosen = {claim.id: dict(claim.quick) | (dict(claim.full) if full else {}) for claim in claims}
    for name, value in changes.items():
        having = [params for params in chosen.values() if name in params]
        if not having:
            known = sorted({name for params in chosen.values() for name in params})
            advice = f"Choose from {', '.join(known)}" if known else "These claims have none"
            raise bad_value("set", "a parameter of a chosen claim", repr(name), advice)
        for params in having:
            params[name] = _like(name, params[name], value)
    return chosen


def _like(name: str, model: Any, value: Any) -> Any:
    """`value`, of the type that `model` has; a whole number will do for a real one."""
    if type(model) is float and type(value) is int:
        return float(value)
    if type(model) is not type(value):
        advice = "Write it as in JSON: 64, 0.5, [1, 2], true"
        raise bad_value(name, f"{_kind(model)}, as in {model!r}", f"{_kind(value)}, {value!r}", advice)
    if isinstance(model, list) and model:
        return [_like(name, model[0], part) for part in value]
    return value


def _kind(value: Any) -> str:
    kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "a word"}
    return kinds.get(type(value), f"a {type(value).__name__}")


# ---- checks of a value -------------------------------------------------------


def whole(name: str, value: object, low: int, high: int = 2**24) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
        return value
    raise refused(name, f"a whole number from {low} to {high}", value)


def within(name: str, value: object, low: float, high: float) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high:
        return float(value)
    raise refused(name, f"a number from {low:g} to {high:g}", value)


def choice(name: str, value: object, options: Sequence[str]) -> str:
    if isinstance(value, str) and value in options:
        return value
    raise refused(name, f"one of {', '.join(options)}", value)


def numbers(name: str, values: list[Any], low: float, high: float, *, least: int = 1) -> list[Any]:
    """At least so many numbers within bounds."""
    if len(values) >= least and all(low <= value <= high for value in values):
        return values
    raise refused(name, f"at least {least} numbers from {low:g} to {high:g}", values)


def ascending(name: str, values: object) -> list[float]:
    """A list of numbers above 0, from small to large."""
    if isinstance(values, list | tuple) and values:
        positive = all(isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < math.inf for x in values)
        if positive and sorted(values) == list(values):
            return [float(x) for x in values]
    raise refused(name, "a list of ascending numbers above 0", values)


def refused(name: str, wanted: str, value: object) -> LevelheadValueError:
    """The error for a value out of its range."""
    return bad_value(name, wanted, repr(value), "Choose a value in this range")
