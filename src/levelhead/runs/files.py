"""Reads a run from any file or directory that levelhead wrote."""

from __future__ import annotations

import os
from pathlib import Path

from levelhead.errors import bad_value
from levelhead.runs import jsonl, parquet
from levelhead.runs.record import Run, load


def read(path: str | os.PathLike[str]) -> Run:
    """The run in a file of `JSONL`, a directory of `Parquet`, or a file that `Run.save` wrote."""
    path = Path(path)
    if not path.exists():
        advice = "Give what a JSONL or Parquet sink wrote, or watch(...).save"
        raise bad_value("path", "a run that was recorded", path, advice)
    if path.is_dir():
        return parquet.read(path)
    with path.open("rb") as file:
        start = file.read(4096)
    if start.startswith(b"PAR1"):
        return parquet.read(path)
    return jsonl.read(path) if f'"{jsonl.FORMAT}"'.encode() in start or path.suffix == ".jsonl" else load(path)
