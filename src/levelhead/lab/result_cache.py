"""Results that need not be measured again: one file for each claim, parameters, seed and code.

Anything that could change a number is part of a file's name: the package's own code, the versions of what it computes
with, the instruction set; for timings also the machine. A file that was damaged is measured again.
"""

from __future__ import annotations

import hashlib
import json
import platform
import warnings
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from levelhead import cache
from levelhead.info import cpu_name, info, installed_version
from levelhead.lab.claim import Task

_PACKAGE = Path(__file__).parents[1]
_COMPUTES = (".py", ".so", ".txt")  # code, the core, and texts that models read
_SHOWS = ("__main__.py", "cli", "lab/figures", "page")  # changes no measurement
_COMPANIONS = ("numpy", "torch", "transformers")


def directory() -> Path:
    return cache.directory("lab")


def load(task: Task) -> dict[str, Any] | None:
    """The outcome that was kept, or None if there is none or it can no longer be read."""
    try:
        text = _place(task).read_text(encoding="utf-8")
        digest, content = text.split("\n", 1)
    except (OSError, ValueError):  # not there, not text, not two parts
        return None
    if digest != _digest(content):
        return None
    kept: dict[str, Any] = json.loads(content)
    return kept


def save(task: Task, outcome: Mapping[str, Any]) -> None:
    """Keeps an outcome. What was undecided is not kept: a model may be installed meanwhile."""
    if outcome["verdict"] == "undecided":
        return
    text = json.dumps(outcome, allow_nan=False)
    try:
        cache.write_whole(_place(task), f"{_digest(text)}\n{text}")
    except OSError as error:
        warnings.warn(f"{task.claim.id} will be measured again next time: {error}", stacklevel=2)


def _place(task: Task) -> Path:
    key: dict[str, Any] = {"params": dict(task.params), "seed": task.seed, "code": _code(info().isa)}
    if task.claim.alone:
        key["machine"] = [cpu_name(), info().threads]
    return directory() / f"{task.claim.id}-{_digest(json.dumps(key, sort_keys=True))}.json"


@lru_cache
def _code(isa: str) -> str:
    """One word for everything that computes: the package, its companions, the instruction set."""
    hashed = hashlib.blake2b(digest_size=16)
    for path in sorted(_PACKAGE.rglob("*")):
        shows = any(path.is_relative_to(_PACKAGE / name) for name in _SHOWS)
        if path.suffix in _COMPUTES and not shows:
            hashed.update(f"{path.relative_to(_PACKAGE)}\0".encode())
            hashed.update(path.read_bytes())
    versions = [isa, platform.python_version(), *(str(installed_version(package)) for package in _COMPANIONS)]
    hashed.update("\0".join(versions).encode())
    return hashed.hexdigest()


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
