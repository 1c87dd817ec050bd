"""Reads a run back from whatever levelhead wrote it to."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from levelhead.errors import LevelheadValueError, expected
from levelhead.runs import jsonl, parquet
from levelhead.runs.record import FORMAT, Run, from_json


def read(path: str | os.PathLike[str]) -> Run:
    """The run in a file of `JSONL`, a directory of `Parquet`, or a file that `Run.save` wrote."""
    path = Path(path)
    if not path.exists():
        advice = "Give what a JSONL or Parquet sink wrote, or watch(...).save"
        raise LevelheadValueError(expected("path", "a run that was recorded", path, advice))
    if path.is_dir():
        return parquet.read(path)
    with path.open("rb") as file:
        start = file.read(4096)
    if start.startswith(b"PAR1"):
        return parquet.read(path)
    if f'"{FORMAT}"'.encode() in start:
        return from_json(_parsed(path))
    return jsonl.read(path)


def _parsed(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        advice = "The file was cut off or changed; record it again"
        raise LevelheadValueError(expected(str(path), "a whole run", error, advice)) from error
