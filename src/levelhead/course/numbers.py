"""A number of the course: its value, the text that is shown, and where it comes from.

`shown` is the only function that rounds. A number is live (computed by the core), recorded (read from a committed
result) or theory (a formula).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal

from levelhead.lab.figure import Source

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_LARGE, _SMALL = 1e6, 1e-4  # from and below these, a power of ten is shown; so does dom.js
_NEAR_ONE = 0.9
CHOSEN = "chosen"  # `where` of a number that somebody chose; so words.js has it


@dataclass(frozen=True)
class Number:
    """`where` names the claim, the figure, the seed or the formula, in symbols and names: it has no language.
    `stderr` is given where the value is a random sample's."""

    value: float
    source: Source
    where: str
    text: str
    stderr: float | None = None


def live(value: float, where: str, digits: int = 2) -> Number:
    """A number that the core has just computed."""
    return _number(value, "live", where, digits, None)


def theory(value: float, where: str, digits: int = 2) -> Number:
    """A number of a formula, which is `where`."""
    return _number(value, "theory", where, digits, None)


def recorded(value: float, where: str, digits: int = 2, *, stderr: float | None = None) -> Number:
    """A number of a committed result. `levelhead.course.results.claim_number` makes it from a claim."""
    return _number(value, "recorded", where, digits, stderr)


def _number(value: float, source: Source, where: str, digits: int, stderr: float | None) -> Number:
    if not math.isfinite(value):
        raise ValueError(f"{where}: a number of the course is {value}")
    return Number(value, source, where, shown(value, digits), stderr)


def shown(value: float, digits: int = 2) -> str:
    """So many significant digits. Whole numbers given as int are exact; nothing but 1 is shown as 1, nor 0 as 0.

    >>> shown(0.6731), shown(0.99987), shown(-31.62), shown(12288), shown(3.2e-7)
    ('0.67', '0.9999', '−32', '12288', '3.2·10⁻⁷')
    """
    if isinstance(value, int) or value == 0:
        return str(value if isinstance(value, int) else 0).replace("-", "−")
    size = abs(value)
    if size >= _LARGE or size < _SMALL:
        digit, power = f"{value:.{digits - 1}e}".split("e")
        return f"{float(digit):g}·10{str(int(power)).translate(_RAISED)}".replace("-", "−")
    if _NEAR_ONE < size < 1:  # as many digits as the distance to 1 needs
        digits = max(digits, -math.floor(math.log10(1 - size)))
    text = f"{Decimal(f'{value:.{digits}g}'):f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text).replace("-", "−")
