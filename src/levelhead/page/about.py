"""The version, the machine and the models, as the page shows them."""

from __future__ import annotations

from typing import Any

from levelhead import models
from levelhead.info import cpu_name, info


def about(*, export: bool, run: bool) -> dict[str, Any]:
    """`export`: the page is a saved file. `run`: the page follows a run."""
    machine = info()
    return {
        "version": machine.version,
        "isa": machine.isa,
        "cpu": cpu_name(),
        "threads": machine.threads,
        "export": export,
        "run": run,
        "models": {known.name: known.path is not None for known in models.available().values()},
    }
