"""The figures of the page, by id: the same numbers in a script, on the page and in its export.

Every panel's module declares once which parameters change its figure (`NEEDS`) and which claims it shows (`CLAIMS`).
A figure accepts all shared parameters, whether it needs them or not. Wrong values are refused before any work.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import cache
from typing import Any

from levelhead.errors import bad_value
from levelhead.lab import recorded, registry
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
from levelhead.lab.measure import Setting
from levelhead.lab.result import Result
from levelhead.lab.settings import OLD_SCALES, choice, refused, renamed

__all__ = ["IDS", "NEEDS", "OLD_SCALES", "PANELS", "claims", "figure", "parameters"]

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
PANELS: tuple[str, ...] = tuple(_FIGURES)
IDS: tuple[str, ...] = (*PANELS, *registry.MODULES)  # panels, and claims, whose figures are drawn from recorded results
NEEDS: Mapping[str, tuple[str, ...]] = dict.fromkeys(IDS, ()) | {id: one.NEEDS for id, one in _FIGURES.items()}
_SHARED = tuple(field.name for field in fields(Setting))


def figure(id: str, **parameters: Any) -> Figure:
    """One figure: a panel, measured now or read from a record; or a claim, drawn from its recorded result.

    >>> figure("walk", d_k=4).facts[1].value
    2.0
    >>> figure("C5").extra["verdict"]
    'confirmed'
    """
    if choice("id", id, IDS) in registry.MODULES:
        for name, value in parameters.items():
            advice = f'Measure it anew: next(levelhead.lab.run("{id}")).figure(); run takes seed and params'
            raise bad_value(name, f"no parameters with {id}, a claim's recorded result", repr(value), advice)
        return _recorded_claim(id)
    parameters = renamed(parameters)
    own = _own(id)
    unknown = [name for name in parameters if name not in (*_SHARED, *own)]
    if unknown:
        known = ", ".join((*_SHARED, *own))
        raise refused(unknown[0], f"a parameter of {id!r}: {known}", parameters[unknown[0]])
    shared = {name: value for name, value in parameters.items() if name in _SHARED}
    rest = {name: value for name, value in parameters.items() if name in own}
    return replace(_maker(id)(Setting(**shared), **rest), claims=_shown(id))


def claims() -> dict[str, dict[str, str]]:
    """The sentence and the recorded verdict of every claim."""
    return {id: {"claim": one["claim"], "verdict": one["verdict"]} for id, one in _results().items()}


def _shown(id: str) -> tuple[dict[str, str], ...]:
    """The claims that a panel shows, with their recorded verdicts."""
    return tuple({"id": claim, "verdict": _results()[claim]["verdict"]} for claim in _FIGURES[id].CLAIMS)


@cache
def _results() -> dict[str, dict[str, Any]]:
    """The recorded results by claim, in the order of the notes."""
    results = {one["id"]: one for one in recorded.load("claims")["results"]}
    return {id: results[id] for id in registry.MODULES}


def _recorded_claim(id: str) -> Figure:
    fields_of = dict(_results()[id])
    about = fields_of.pop("about")
    return Result(**fields_of).figure(source="recorded", recorded=recorded.source(about))


def parameters(id: str) -> dict[str, Any]:
    """Names and defaults of all that `figure(id, …)` takes: nothing for a claim, whose result is recorded."""
    if id in registry.MODULES:
        return {}
    shared = Setting()
    return {name: getattr(shared, name) for name in _SHARED} | _own(id)


def _own(id: str) -> dict[str, Any]:
    """Parameters besides the shared ones, with their defaults."""
    signature = inspect.signature(_maker(id))
    return {one.name: one.default for one in list(signature.parameters.values())[1:]}


def _maker(id: str) -> Callable[..., Figure]:
    maker: Callable[..., Figure] = _FIGURES[id].figure
    return maker
