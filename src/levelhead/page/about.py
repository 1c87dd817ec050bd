"""What the page says about the machine that computes for it."""

from __future__ import annotations

from typing import Any

import levelhead as lh
from levelhead.bench.run import cpu_name

__all__ = ["about"]


def about(*, export: bool, run: bool) -> dict[str, Any]:
    """`export`: saved to a file. `run`: a run is followed."""
    info = lh.info()
    models = {known.name: known.path is not None for known in lh.models.available().values()}
    return {
        "version": info.version,
        "isa": info.isa,
        "cpu": cpu_name(),
        "threads": info.threads,
        "export": export,
        "run": run,
        "models": models,
    }
