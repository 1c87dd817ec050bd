"""Packages that only one destination needs: imported when it is made, or named in an error."""

from __future__ import annotations

import importlib
from typing import Any

from levelhead.errors import LevelheadError, expected

SINKS = 'pip install "levelhead[sinks]"'


class MissingPackageError(LevelheadError, ImportError):
    """The package of a sink is not installed."""


def need(sink: str, *modules: str, install: str = SINKS) -> Any:
    """The first of these modules that is installed; else an error with the command that installs it."""
    for module in modules:
        try:
            return importlib.import_module(module)
        except ImportError as error:
            missing = error
    packages = " or ".join(module.partition(".")[0] for module in modules)
    message = expected(sink, f"the package {packages}", f"none ({missing})", f"Install it with: {install}")
    raise MissingPackageError(message) from missing
