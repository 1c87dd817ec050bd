"""Which modules of a watched model attend, and whether each was seen: never silence.

Modules that were seen say how; those that look as if they attend, by their code or their name, and
were not seen, say why that may be.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from levelhead.runs.record import Seen
from levelhead.torch.huggingface.survey import attending_modules
from levelhead.watching.module_stack import Place

_FAST_PATH = "its native fast path was switched off while watching: results differ by rounding"


def report(watch: Any) -> tuple[Seen, ...]:
    """A line for every module that was seen or should have been."""
    expected = {id(found.module) for found in attending_modules(watch.model)}
    seen = [place for place in watch.places if place.calls]
    lines = []
    for place in watch.places:
        if place.calls:
            how = ", ".join(place.ways)
            note = "; ".join([*([_FAST_PATH] if place.slowed else []), *place.unseen])
            lines.append(Seen(place.name, place.kind, True, how, place.calls, note))
        elif _missed(place, seen, expected):
            lines.append(Seen(place.name, place.kind, False, _why(place, watch), 0))
    return tuple(lines)


def _missed(place: Place, seen: list[Place], expected: set[int]) -> bool:
    """Whether it attends by its looks, and nobody within or around it was seen instead."""
    if id(place.module) not in expected and not place.attends:
        return False
    within = f"{place.name}." if place.name else ""
    inside = any(other.startswith(within) for other in _names(seen))
    around = any(place.name.startswith(f"{other}.") and other for other in _names(seen))
    holds = any(_attends(child) for child in place.module.modules() if child is not place.module)
    return not (inside or around or (holds and id(place.module) not in expected))


def _names(seen: list[Place]) -> list[str]:
    return [place.name for place in seen]


def _attends(module: nn.Module) -> bool:
    place = getattr(module, "_levelhead_place", None)
    return place is not None and bool(place.attends)


def _why(place: Place, watch: Any) -> str:
    if place.unseen:
        return "; ".join(place.unseen)
    if not place.entered and watch.compiled:
        return "did not run while watched, or formed its softmax by hand in a compiled graph"
    if not place.entered:
        return "did not run while watched"
    if watch.deep:
        return "ran, but no softmax over a product of two tensors was met in it"
    return "ran, but called no attention function; a softmax by hand is seen with deep=True"
