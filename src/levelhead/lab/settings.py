"""The parameters an experiment gets: quick or full ones, with what a user changed.

A change must name a parameter of a chosen claim and have its type; whether the value makes sense is
for the claim to say, with the words below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from levelhead.errors import LevelheadValueError, expected
from levelhead.lab.claim import Claim, Params

__all__ = ["applied", "numbers", "whole", "within"]


def applied(claims: Sequence[Claim], changes: Params, *, full: bool) -> Mapping[str, Params]:
    """Parameters by the claim's id."""
    chosen = {claim.id: dict(claim.quick) | (dict(claim.full) if full else {}) for claim in claims}
    for name, value in changes.items():
        having = [params for params in chosen.values() if name in params]
        if not having:
            known = sorted({name for params in chosen.values() for name in params})
            advice = f"Choose from {', '.join(known)}" if known else "These claims have none"
            wanted = "a parameter of a chosen claim"
            raise LevelheadValueError(expected("set", wanted, repr(name), advice))
        for params in having:
            params[name] = _like(name, params[name], value)
    return chosen


def _like(name: str, model: Any, value: Any) -> Any:
    """`value`, of the type that `model` has; a whole number will do for a real one."""
    if type(model) is float and type(value) is int:
        return float(value)
    if type(model) is not type(value):
        wanted = f"{_kind(model)}, as in {model!r}"
        advice = "Write it as in JSON: 64, 0.5, [1, 2], true"
        raise LevelheadValueError(expected(name, wanted, f"{_kind(value)}, {value!r}", advice))
    if isinstance(model, list) and model:
        return [_like(name, model[0], part) for part in value]
    return value


def _kind(value: Any) -> str:
    kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "a word"}
    return kinds.get(type(value), f"a {type(value).__name__}")


# ---- what a claim says about a value ----------------------------------------


def whole(name: str, value: object, low: int, high: int) -> int:
    """A whole number within bounds."""
    if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
        return value
    raise _outside(name, "a whole number", value, low, high)


def within(name: str, value: float, low: float, high: float) -> float:
    """A number within bounds."""
    if low <= value <= high:
        return value
    raise _outside(name, "a number", value, low, high)


def numbers(name: str, values: list[Any], low: float, high: float, *, least: int = 1) -> list[Any]:
    """At least so many numbers within bounds."""
    if len(values) >= least and all(low <= value <= high for value in values):
        return values
    raise _outside(name, f"at least {least} numbers", values, low, high)


def _outside(name: str, what: str, value: object, low: float, high: float) -> LevelheadValueError:
    wanted = f"{what} from {low} to {high}"
    return LevelheadValueError(expected(name, wanted, repr(value), "Choose a value in this range"))
