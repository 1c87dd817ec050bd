"""One run out of a file that was written in several sessions.

A training run that is killed and resumed from a checkpoint writes to the same file again, and repeats some steps. The
later session counts: it led to the present model. Both lossless sinks use this; writing and formats are elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from levelhead._version import __version__
from levelhead.errors import bad_value
from levelhead.runs import tally
from levelhead.runs.record import Run, Snapshot

FORMAT_VERSION = 1


def header(kind: str, model: str) -> dict[str, Any]:
    """The first entry of a session."""
    versions = {"format_version": FORMAT_VERSION, "version": __version__}
    return {"format": kind, **versions, "model": model, "columns": list(tally.COLUMNS)}


def check(header: Any, kind: str, path: Path) -> dict[str, Any]:
    """The header if this version of levelhead can read what follows it."""
    if not isinstance(header, dict) or header.get("format") != kind:
        raise bad_value(str(path), f'"format": "{kind}"', "another", "Give a path that this sink wrote")
    if header.get("format_version") != FORMAT_VERSION or header.get("columns") != list(tally.COLUMNS):
        given = f"version {header.get('format_version')} of levelhead {header.get('version')}"
        advice = "Read it with that version, or write to another path with this one"
        raise bad_value(str(path), f"format version {FORMAT_VERSION} with the same columns", given, advice)
    return header


def join(sessions: Iterable[tuple[dict[str, Any], list[Snapshot]]], notes: Iterable[str] = ()) -> Run:
    """The run: each session replaces the snapshots of earlier ones from its first step on."""
    sessions = list(sessions)
    snapshots: list[Snapshot] = []
    replaced = []
    for _, later in sessions:
        first = min((snapshot.step for snapshot in later), default=math.inf)
        kept = [snapshot for snapshot in snapshots if snapshot.step < first]
        if count := len(snapshots) - len(kept):
            replaced.append(f"{count} snapshots from step {first} on were written again later")
        snapshots = kept + later
    last = sessions[-1][0]
    return Run(str(last["model"]), tuple(snapshots), notes=(*notes, *replaced), version=str(last["version"]))
