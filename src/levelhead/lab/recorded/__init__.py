"""What was measured once and committed: each file says on what machine, when and how."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from levelhead.errors import LevelheadValueError, expected

__all__ = ["load", "names"]

_SUFFIX = ".json"


def names() -> list[str]:
    """What there is."""
    files = (x.name for x in resources.files(__name__).iterdir())
    return sorted(name.removesuffix(_SUFFIX) for name in files if name.endswith(_SUFFIX))


def load(name: str) -> dict[str, Any]:
    """A recording by its name."""
    if name not in names():
        wanted = "one of " + ", ".join(names())
        raise LevelheadValueError(expected("recording", wanted, repr(name), "Check the spelling"))
    text = (resources.files(__name__) / f"{name}{_SUFFIX}").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found
