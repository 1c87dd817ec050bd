"""Which code serves what a lower layer cannot: arrays that differentiate, results in a notebook. Layers above register.

So `attention.py` and `additive.py` import nothing above them, and a front end is loaded when its arrays first arrive.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

_LOADERS: dict[tuple[str, str], Callable[[], ModuleType]] = {}


def register(family: str, function: str, load: Callable[[], ModuleType]) -> None:
    """`load` imports the module that serves `function` ("attention", "additive", "row states", "html") for a `family`
    of arrays, or for a "notebook"."""
    _LOADERS[family, function] = load


def serving(family: str, function: str) -> ModuleType:
    """The module that was registered, imported at its first use."""
    return _LOADERS[family, function]()
