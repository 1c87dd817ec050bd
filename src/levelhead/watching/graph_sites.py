"""Which of a module's calls a call in a compiled graph is: told apart by the place in the code that Dynamo traces.

While a graph is traced, each place gets a number, 1 for the first in its run of the module; a loop that Dynamo unrolls
is one place. The operator in the graph has that number. On both sides of a graph break numbers begin again.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from levelhead.watching.call_sites import Place

_OWN = os.path.dirname(__file__) + os.sep
_CALL = nn.Module._call_impl.__code__
_numbers: Any = WeakIdKeyDictionary()  # by graph: depth of modules -> place -> its number


def traced_by() -> Any:
    """Dynamo's translator of the function that is being traced; None: nothing is."""
    convert = sys.modules.get("torch._dynamo.symbolic_convert")
    current = getattr(getattr(convert, "InstructionTranslator", None), "current_tx", None)
    return None if current is None else current()


def begin_run(depth: int) -> None:
    """A module at this depth is entered, while Dynamo traces it."""
    tracer = traced_by()
    if tracer is not None:
        _numbers.setdefault(tracer.output, {})[depth] = {}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def number(depth: int) -> int:
    """The number of the place that is being traced, in the module at this depth."""
    tracer = traced_by()
    if tracer is None:
        return 1
    places = _numbers.setdefault(tracer.output, {}).setdefault(depth, {})
    return int(places.setdefault(_place(tracer.output.current_tx), len(places) + 1))


def _place(tracer: Any) -> Place:
    instructions = []
    while tracer is not None and tracer.f_code is not _CALL:
        if not tracer.f_code.co_filename.startswith(_OWN):
            instructions.append((tracer.f_code, int(tracer.instruction_pointer or 0)))
        tracer = getattr(tracer, "parent", None)
    return tuple(instructions)


def place(number: int) -> Place:
    """The place of a call in a graph."""
    return ((place.__code__, number),)
