"""Reads a run from any file or directory that levelhead wrote."""

from __future__ import annotations

import os
from pathlib import Path

from levelhead.errors import bad_value
from levelhead.runs import jsonl, parquet
from levelhead.runs.record import FORMAT, Run, load


def read(path: str | os.PathLike[str]) -> Run:
    """The run in a file of `JSONL`, a directory of `Parquet`, or a file that `Run.save` wrote."""
    path = Path(path)
    if path.is_dir():
        return parquet.read(path)
    try:
        with path.open("rb") as file:
            start = file.read(4096)
    except OSError as error:
        given = f"{str(path)!r}: {error.strerror or error}"
        advice = "Give what a JSONL or Parquet sink wrote, watch(...).save or levelhead doctor --json"
        raise bad_value("path", "a run that was recorded", given, advice) from None
    if start.startswith(b"PAR1"):
        return parquet.read(path)
    lines = path.suffix == ".jsonl" and f'"{FORMAT}"'.encode() not in start  # cut off before its first line says so
    return jsonl.read(path) if lines or f'"{jsonl.FORMAT}"'.encode() in start else load(path)
