"""One run out of a file that was written in several sessions.

A training run that is killed and resumed from a checkpoint writes to the same file again, and its
first steps there were written before. The later session is right about them: it led to the model
that there is. Both lossless sinks read their files through this; neither the writing nor the
formats are here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from levelhead.errors import LevelheadValueError, expected
from levelhead.runs import tally
from levelhead.runs.record import Run, Snapshot

FORMAT_VERSION = 1


def header(kind: str, model: str, version: str) -> dict[str, Any]:
    """What a session says about itself before its first snapshot."""
    return {
        "format": kind,
        "format_version": FORMAT_VERSION,
        "version": version,
        "model": model,
        "columns": list(tally.COLUMNS),
    }


def check(found: Any, kind: str, path: Path) -> dict[str, Any]:
    """The header if this version of levelhead can read what follows it."""
    if not isinstance(found, dict) or found.get("format") != kind:
        advice = "Give a path that this sink wrote"
        raise LevelheadValueError(expected(str(path), f'"format": "{kind}"', "another", advice))
    right = found.get("format_version") == FORMAT_VERSION
    if not right or found.get("columns") != list(tally.COLUMNS):
        given = f"version {found.get('format_version')} of levelhead {found.get('version')}"
        advice = "Read it with that version, or write to another path with this one"
        want = f"format version {FORMAT_VERSION} with the same columns"
        raise LevelheadValueError(expected(str(path), want, given, advice))
    return found


def join(sessions: Iterable[tuple[dict[str, Any], list[Snapshot]]], notes: Iterable[str] = ()) -> Run:
    """The run: each session replaces what earlier ones said of its first step and after."""
    sessions = list(sessions)
    snapshots: list[Snapshot] = []
    replaced = []
    for _, later in sessions:
        first = min((snapshot.step for snapshot in later), default=math.inf)
        kept = [snapshot for snapshot in snapshots if snapshot.step < first]
        if len(kept) < len(snapshots):
            count = len(snapshots) - len(kept)
            replaced.append(f"{count} snapshots from step {first} on were written again later")
        snapshots = kept + later
    said = sessions[-1][0]
    model, version = str(said["model"]), str(said["version"])
    return Run(model, tuple(snapshots), notes=(*notes, *replaced), version=version)
