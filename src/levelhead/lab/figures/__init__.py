"""The figures of the page, by id: the same numbers in a script, on the page and in its export.

Every figure takes the page's shared controls, whether it depends on them or not, and some take
parameters of their own. Wrong ones are refused here, before any work.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from levelhead.lab.experiment import Setting
from levelhead.lab.experiment import wrong as _wrong
from levelhead.lab.figure import Figure
from levelhead.lab.figures import (
    additive,
    attack,
    heads,
    jacobian,
    logits,
    online,
    root,
    sentence,
    speed,
    training,
    walk,
)

__all__ = ["DEPENDS", "IDS", "figure", "parameters"]

_FIGURES: Mapping[str, Any] = {
    "logits": logits,
    "walk": walk,
    "root": root,
    "jacobian": jacobian,
    "training": training,
    "additive": additive,
    "attack": attack,
    "online": online,
    "sentence": sentence,
    "heads": heads,
    "speed": speed,
}  # in the order of the page
IDS: tuple[str, ...] = tuple(_FIGURES)
# The shared controls each depends on; on the seed wherever it depends on any.
DEPENDS: Mapping[str, tuple[str, ...]] = {name: one.DEPENDS for name, one in _FIGURES.items()}
_SHARED = tuple(field.name for field in fields(Setting))


def figure(id: str, **parameters: Any) -> Figure:
    """One figure, measured now or read from a record.

    >>> figure("walk", d_k=4).facts[1].value
    2.0
    """
    own = _own(id)
    unknown = [name for name in parameters if name not in (*_SHARED, *own)]
    if unknown:
        known = ", ".join((*_SHARED, *own))
        raise _wrong(unknown[0], f"a parameter of {id!r}: {known}", parameters[unknown[0]])
    shared = {name: value for name, value in parameters.items() if name in _SHARED}
    rest = {name: value for name, value in parameters.items() if name in own}
    return _maker(id)(Setting(**shared), **rest)


def parameters(id: str) -> dict[str, Any]:
    """Names and defaults of all that `figure(id, …)` takes."""
    shared = Setting()
    return {name: getattr(shared, name) for name in _SHARED} | _own(id)


def _own(id: str) -> dict[str, Any]:
    """Parameters besides the shared controls, with their defaults."""
    given = list(inspect.signature(_maker(id)).parameters.values())[1:]
    return {one.name: one.default for one in given}


def _maker(id: str) -> Callable[..., Figure]:
    if id not in _FIGURES:
        raise _wrong("id", f"one of {', '.join(IDS)}", id)
    maker: Callable[..., Figure] = _FIGURES[id].figure
    return maker
