"""The parameters of figures: kind, range and default of each, declared here and nowhere else.

Figures check their arguments against this table, the server reads addresses by it, and the page takes its controls,
defaults and links from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from levelhead.lab import tasks
from levelhead.lab.settings import choice, whole, within

POWER = "1/d_k^p"  # with the parameter `power` as p
SCALES = ("none", "1/sqrt(d_k)", "1/d_k", "1/sqrt(d)", POWER)  # the rules of levelhead.call.scaling, and the power
CURES = ("none", "1/d_k", "qk-norm", "softcap")  # of the figure "attack"


@dataclass(frozen=True)
class Whole:
    low: int
    high: int
    default: int

    def check(self, name: str, value: Any) -> int:
        return whole(name, value, self.low, self.high)


@dataclass(frozen=True)
class Real:
    low: float
    high: float
    default: float

    def check(self, name: str, value: Any) -> float:
        return within(name, value, self.low, self.high)


@dataclass(frozen=True)
class Choice:
    options: Sequence[str]
    default: str

    def check(self, name: str, value: Any) -> str:
        return choice(name, value, self.options)


Parameter: TypeAlias = Whole | Real | Choice

PARAMETERS: Mapping[str, Parameter] = {
    "d_k": Whole(1, 4096, 64),
    "scale": Choice(SCALES, "1/sqrt(d_k)"),
    "power": Real(0.0, 1.0, 0.5),
    "keys": Whole(2, 4096, 32),
    "seed": Whole(0, 2**32 - 1, 0),
    # training: which of the recorded trainings
    "task": Choice(tuple(tasks.TASKS), "retrieval"),
    "width": Whole(1, 4096, 256),
    "depth": Whole(1, 64, 1),
    # attack
    "sigma": Real(0.25, 4.0, 1.0),
    "rho": Real(0.0, 1.0, 0.5),
    "growth": Real(0.5, 8.0, 1.0),
    "cure": Choice(CURES, "none"),
    "cap": Real(1.0, 100.0, 30.0),
    # online
    "tile": Whole(1, 4096, 8),
    "order": Whole(0, 2**32 - 1, 0),
}


def default(name: str) -> Any:
    """A parameter's value where none is given."""
    return PARAMETERS[name].default


def check(**values: Any) -> None:
    """Refuses a value outside its parameter's range."""
    for name, value in values.items():
        PARAMETERS[name].check(name, value)
