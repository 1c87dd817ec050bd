"""What the files in bench/results say about where they were made."""

from __future__ import annotations

import platform
from datetime import date
from typing import Any

from levelhead.info import cpu_name


def machine(threads: int) -> dict[str, Any]:
    return {"date": date.today().isoformat(), "cpu": cpu_name(), "threads": threads}


def versions() -> dict[str, str]:
    import numpy
    import torch

    import levelhead

    modules = (levelhead, torch, numpy)
    return {**{module.__name__: str(module.__version__) for module in modules}, "python": platform.python_version()}
