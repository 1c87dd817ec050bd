"""Which of a module's calls a call is: told apart by the place in the code that made it.

A module may attend at several places in one run: to itself and to another sequence, or as the difference of two
softmaxes. Each such place has a number, 1 for the first, and a record of its own. Calls from one place, in a loop or in
several runs of the module, are one; so are places of which a run uses only one, as branches. `graph_sites` is the same
in a compiled graph.
"""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType
from typing import TypeAlias

from torch import nn

LIMIT = 8  # places of a module that are told apart; the last number has the others, too

Place: TypeAlias = tuple[tuple[CodeType, int], ...]
_OWN = os.path.dirname(__file__) + os.sep
_CALL = nn.Module._call_impl.__code__


def place(module: nn.Module) -> Place:
    """The instructions that are being executed, from the call up to the module's `forward`."""
    at: FrameType | None = sys._getframe(1)
    instructions = []
    while at is not None:
        code = at.f_code
        if code is _CALL and at.f_locals.get("self") is module:
            break
        if not code.co_filename.startswith(_OWN):
            instructions.append((code, at.f_lasti))
        at = at.f_back
    return tuple(instructions)


class Sites:
    """The numbers of one module's places, for as long as it is watched."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, Place], int] = {}

    def number(self, used: dict[tuple[int, int], Place], heads: int, place: Place) -> int:
        """Of a call with so many heads; `used`: by heads and number, the places of this run of the module so far."""
        known = self._numbers.get((heads, place))
        if known is None or used.get((heads, known), place) != place:  # another place has that number in this run
            taken = [number for several, number in used if several == heads]
            known = self._numbers[heads, place] = min(max(taken, default=0) + 1, LIMIT)
        used[heads, known] = place
        return known
