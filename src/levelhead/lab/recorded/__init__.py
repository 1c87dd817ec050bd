"""Committed runs that figures show: what is too slow to measure while somebody waits.

Each is a JSON file beside this one that says where, when and how it was made. They are data; what
they mean is the business of the figure that shows them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from levelhead.errors import LevelheadValueError, expected

__all__ = ["load", "names", "source"]

_FOLDER = Path(__file__).parent
_SHORT = 80  # characters


def names() -> list[str]:
    """The runs there are."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


@cache
def load(name: str) -> dict[str, Any]:
    """A run by name. It is shared by all who ask: read it, change nothing."""
    if name not in names():
        advice = "It is part of the installed package; install levelhead again"
        raise LevelheadValueError(expected("recording", f"one of {', '.join(names())}", repr(name), advice))
    found: dict[str, Any] = json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


def source(about: Mapping[str, Any]) -> str:
    """Where a run comes from, in one line; what is longer than a word or two is in the file."""
    return ", ".join(f"{name}: {x}" for name, x in about.items() if len(str(x)) <= _SHORT)
