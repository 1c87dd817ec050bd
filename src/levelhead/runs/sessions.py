"""One run out of a file that was written in several sessions.

A training run that is killed and resumed from a checkpoint writes to the same file again, and repeats some steps. The
later session counts: it led to the present model. Both lossless sinks use this; writing and formats are elsewhere.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from levelhead._version import __version__
from levelhead.errors import bad_value
from levelhead.runs import tally
from levelhead.runs.record import FORMAT_VERSION, Run, Snapshot, check_format


def header(kind: str, model: str) -> dict[str, Any]:
    """The first entry of a session."""
    versions = {"format_version": FORMAT_VERSION, "version": __version__}
    return {"format": kind, **versions, "model": model, "columns": list(tally.COLUMNS)}


def check(header: Any, kind: str, path: Path) -> dict[str, Any]:
    """The header if this version of levelhead can read what follows it."""
    return check_format(header, kind, str(path), "Give a path that this sink wrote")


@dataclass
class Session:
    """What one process wrote, from its start to its end."""

    header: dict[str, Any]
    rank: int | None = None  # of torch.distributed; None: the only process
    snapshots: list[Snapshot] = field(default_factory=list)
    logged: dict[str, list[tuple[int, float]]] = field(default_factory=dict)

    def log(self, more: Mapping[str, Iterable[tuple[int, float]]]) -> None:
        """Adds numbers to the curves of the session."""
        for name, points in more.items():
            self.logged.setdefault(name, []).extend(points)

    @property
    def first(self) -> float:
        """The first step it wrote."""
        steps = [*(s.step for s in self.snapshots), *(step for curve in self.logged.values() for step, _ in curve)]
        return min(steps, default=math.inf)


def rank() -> int | None:
    """The rank of this process among several, by torch.distributed; None in a process alone."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    return int(dist.get_rank())


def join(sessions: Iterable[Session], notes: Iterable[str] = ()) -> Run:
    """The run: of each rank, a session replaces earlier ones from its first step on; then ranks are joined by step."""
    sessions = list(sessions)
    said = list(notes)
    by_rank: dict[int | None, Session] = {}
    for later in sessions:
        kept = by_rank.setdefault(later.rank, Session(later.header, later.rank))
        before = len(kept.snapshots)
        kept.snapshots = [snapshot for snapshot in kept.snapshots if snapshot.step < later.first]
        if count := before - len(kept.snapshots):
            said.append(f"{count} snapshots from step {later.first} on were written again later")
        kept.logged = {
            name: [point for point in curve if point[0] < later.first] for name, curve in kept.logged.items()
        }
        kept.snapshots += later.snapshots
        kept.log(later.logged)
    last, ranks = sessions[-1].header, sorted(by_rank, key=lambda rank: -1 if rank is None else rank)
    snapshots: list[Snapshot] = by_rank[ranks[0]].snapshots
    if len(ranks) > 1:
        snapshots = _merged([by_rank[rank] for rank in ranks])
        said.append(f"{len(ranks)} ranks wrote this file: modules of the same name and size were joined by step")
    logged = {name: tuple(curve) for name, curve in by_rank[ranks[0]].logged.items()}  # a loss is every rank's own
    model, version = str(last["model"]), str(last["version"])
    return Run(model, tuple(snapshots), notes=tuple(said), version=version, logged=logged)


def _merged(ranks: list[Session]) -> list[Snapshot]:
    """One snapshot per step, of all ranks; modules that differ in size were parts of different models, and refused."""
    by_step: dict[int, Snapshot] = {}
    sizes: dict[str, tuple[tuple[int, int], int | None]] = {}
    for each in ranks:
        for snapshot in each.snapshots:
            for record in snapshot.records:
                size = (len(record.tally), record.facts.d_k)
                known, other = sizes.setdefault(record.module, (size, each.rank))
                if known != size and other != each.rank:
                    given = f"{record.module!r} with {known[0]} heads on rank {other} and {size[0]} on rank {each.rank}"
                    advice = "Write a file per rank where ranks have different layers, and read them one by one"
                    raise bad_value("ranks", "the same modules on every rank of a file", given, advice)
            earlier = by_step.get(snapshot.step)
            by_step[snapshot.step] = snapshot if earlier is None else earlier.merged(snapshot)
    return [by_step[step] for step in sorted(by_step)]
