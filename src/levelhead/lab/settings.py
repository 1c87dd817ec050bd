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

# The names of scales before they were those of `levelhead.call.scaling`; saved snippets, links and scripts have them.
OLD_SCALES = {"none": "none", "sqrt": "1/sqrt(d_k)", "d_k": "1/d_k", "width": "1/sqrt(d)", "power": "1/d_k^p"}


def renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    """With `scale` for `divide`, its name in version 0.1, which had names of its own for the rules."""
    if "divide" not in values:
        return dict(values)
    if "scale" in values:
        raise bad_value("divide", "no scale beside it", repr(values["scale"]), "It is the old name of scale: give one")
    rule = OLD_SCALES[choice("divide", values["divide"], tuple(OLD_SCALES))]
    return {**{name: value for name, value in values.items() if name != "divide"}, "scale": rule}


def applied(claims: Sequence[Claim], changes: Params, *, full: bool) -> Mapping[str, Params]:
    """Parameters by the claim's id."""
    chosen = {claim.id: dict(claim.quick) | (dict(claim.full) if full else {}) for claim in claims}
    for name, value in renamed(changes).items():
        having = [params for params in chosen.values() if name in params]
        if "divide" in changes and name == "scale":  # of a claim whose scale is a number there was no other name
            having = [params for params in having if isinstance(params[name], str)]
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
