"""Committed runs that figures show: measurements that take too long for a reader to wait.

Each is a JSON file beside this one. Its "about" holds where, when and how it was made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from levelhead.errors import bad_value

__all__ = ["load", "names", "source"]

_FOLDER = Path(__file__).parent
_SHORT = 80  # characters


def names() -> list[str]:
    """The names of all runs."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


@cache
def load(name: str) -> dict[str, Any]:
    """A run by name. Callers share it and must not change it."""
    if name not in names():
        advice = "It is part of the installed package; install levelhead again"
        raise bad_value("recording", f"one of {', '.join(names())}", repr(name), advice)
    run: dict[str, Any] = json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return run


def source(about: Mapping[str, Any]) -> str:
    """Where a run comes from, in one line; longer values are left out."""
    return ", ".join(f"{name}: {x}" for name, x in about.items() if len(str(x)) <= _SHORT)
