"""The scale rules: which number multiplies q·k, by name or by value.

The only home of these formulas. The kernel and `reference` apply them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from levelhead.checks import integer, per_head, reals, refuse_any, short_repr
from levelhead.errors import bad_type, bad_value


@dataclass(frozen=True, slots=True)
class Rule:
    """A named rule and its parameters; made by `rule`."""

    name: str
    width: int | None = None
    factor: float | tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Scale:
    """What multiplies q·k: s = factor[h] · q·k, times ln(n_i) where `log_n`.

    With `cosine`, the rows of q and k are first divided by their norms (a zero row stays zero).
    """

    factor: NDArray[np.float64]  # (H,)
    cosine: bool = False
    log_n: bool = False


ScaleLike: TypeAlias = "float | str | Rule | NDArray[Any] | list[float] | tuple[float, ...] | None"


def usual(d_k: int) -> float:
    """1/√d_k, the scale of a call that passes none."""
    return 1.0 / math.sqrt(max(d_k, 1))


# By name: the rule in words, and its factor for H heads of width d_k. A width of 0 counts as 1.
_RULES: dict[str, tuple[str, Callable[[int, int, Rule], float | tuple[float, ...]]]] = {
    "none": ("s = q·k", lambda H, d_k, rule: 1.0),
    "1/sqrt(d_k)": ("s = q·k / √d_k", lambda H, d_k, rule: usual(d_k)),
    "1/d_k": ("s = q·k / d_k", lambda H, d_k, rule: 1.0 / max(d_k, 1)),
    "1/sqrt(d)": (  # d is the model's width, all heads together
        "s = q·k / √d, d = H·d_k unless width is given",
        lambda H, d_k, rule: 1.0 / math.sqrt(max(rule.width or H * d_k, 1)),
    ),
    "cosine": (  # √d_k·cos(q, k) spreads like q·k/√d_k does for rows of norm √d_k
        "s = f · cos(q, k), f = √d_k unless factor is given",
        lambda H, d_k, rule: math.sqrt(max(d_k, 1)) if rule.factor is None else rule.factor,
    ),
    "log-n": ("s = ln(n_i) · q·k / √d_k, n_i = keys left to row i", lambda H, d_k, rule: usual(d_k)),
}
RULES: Mapping[str, str] = MappingProxyType({name: text for name, (text, _) in _RULES.items()})
_NAMES = "one of " + ", ".join(f'"{name}"' for name in RULES)
_ADVICE = "Pass None for 1/sqrt(d_k), a finite number, one per query head, or a rule name"


def rule(name: str, *, width: int | None = None, factor: float | list[float] | None = None) -> Rule:
    """A named scale rule with its parameter.

    Args:
        name: one of `RULES`.
        width: the model's width d, for "1/sqrt(d)" only.
        factor: what multiplies the cosine, a number or one per head, for "cosine" only.

    >>> rule("1/sqrt(d)", width=512)
    Rule(name='1/sqrt(d)', width=512, factor=None)
    """
    if not isinstance(name, str):
        raise bad_type("scale", _NAMES, short_repr(name), "Pass the rule's name")
    if name not in RULES:
        raise bad_value("scale", _NAMES, repr(name), "Check the spelling")
    if width is not None:
        if name != "1/sqrt(d)":
            _refuse("width", "1/sqrt(d)", name)
        advice = "Pass the model's width, heads x d_k"
        width = integer("width", width, "an integer of at least 1", advice, lambda n: n >= 1)
    if factor is not None and name != "cosine":
        _refuse("factor", "cosine", name)
    return Rule(name, width, None if factor is None else _finite("factor", factor))


def resolve(scale: ScaleLike, *, heads: int, d_k: int) -> Scale:
    """What `scale` means for H query heads of key width d_k."""
    if scale is None:
        return Scale(filled(heads, usual(d_k), np.float64))
    if isinstance(scale, str):
        scale = rule(scale)
    if isinstance(scale, Rule):
        value, name = _RULES[scale.name][1](heads, d_k, scale), scale.name
    else:
        value, name = _finite("scale", scale), ""
    if isinstance(value, tuple):
        factor = per_head("scale", value, heads, "one finite number per query head", _ADVICE)
    else:
        factor = filled(heads, value, np.float64)
    return Scale(factor, cosine=name == "cosine", log_n=name == "log-n")


def filled(size: int, value: float, dtype: Any) -> NDArray[Any]:
    """`np.full` at a third of its cost."""
    array = np.empty(size, dtype)
    array.fill(value)
    return array


def power(d_k: int, p: float) -> float:
    """1/d_k^p: the family of "none" (p = 0), "1/sqrt(d_k)" (p = 1/2) and "1/d_k" (p = 1).

    >>> power(64, 0.5)
    0.125
    """
    return float(max(d_k, 1) ** -p)


def _finite(argument: str, value: object) -> float | tuple[float, ...]:
    """A finite number, or one per head; zero and negative numbers are legal."""
    what = "a finite number, or one per query head"
    values = reals(argument, value, what, _ADVICE)
    if values.ndim > 1:
        raise bad_value(argument, what, f"shape {values.shape}", _ADVICE)
    refuse_any(argument, values[~np.isfinite(values)], what, _ADVICE)
    return float(values) if values.ndim == 0 else tuple(values.tolist())


def _refuse(parameter: str, owner: str, name: str) -> None:
    raise bad_value(parameter, f'no value for the rule "{name}"', "one", f'Only "{owner}" takes a {parameter}')
