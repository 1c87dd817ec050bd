"""Trainings by plan, each done once: kept on disk, and shared by all claims and processes.

The key is the plan and everything its curves follow from: the code of tasks, model and training,
and the versions beneath. A file appears by a rename, whole or not at all. Processes that want the
same trainings divide them: who finds one locked takes the next, and comes back for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from levelhead import gguf_cache
from levelhead._version import __version__
from levelhead.errors import LevelheadValueError, expected
from levelhead.lab import tasks
from levelhead.lab.claim import Tell, UndecidedError
from levelhead.lab.plan import Curves, Plan
from levelhead.lab.seeds import Training as Run

__all__ = ["directory", "forget", "trained"]

_CODE = ("plan.py", "tasks.py", "training.py", "transformer.py")


def trained(plans: Sequence[Plan], tell: Tell) -> list[Run]:
    """Every plan's curves, in order; what is missing is trained and kept."""
    _require_torch()
    wanted = list(dict.fromkeys(plans))
    found: dict[Plan, Curves] = {}
    for wait in (False, True):
        for plan in (x for x in wanted if x not in found):
            tell(len(found) / len(wanted), _named(plan))
            curves = _kept(plan) or _made(plan, wait)
            if curves is not None:
                found[plan] = curves
    tell(1.0, f"{len(wanted)} trainings")
    return [Run(plan, found[plan]) for plan in plans]


def directory() -> Path:
    return gguf_cache.directory() / "lab" / "training"


def forget() -> None:
    """Removes all that is kept: what `--fresh` means for trainings."""
    shutil.rmtree(directory(), ignore_errors=True)


def _made(plan: Plan, wait: bool) -> Curves | None:
    """Trained here, unless another process is at it (then waited for, or None)."""
    with _locked(_place(plan).with_suffix(".lock"), wait) as ours:
        if not ours:
            return None
        curves = _kept(plan)  # by whom we waited for
        if curves is None:
            from levelhead.lab.training import train

            curves = train(plan)
            _keep(plan, curves)
        return curves


def _kept(plan: Plan) -> Curves | None:
    try:
        content = json.loads(_place(plan).read_text(encoding="utf-8"))
        return Curves(**content)
    except (OSError, ValueError, TypeError):  # not there, or damaged: to be made again
        return None


def _keep(plan: Plan, curves: Curves) -> None:
    place = _place(plan)
    handle, name = tempfile.mkstemp(prefix=".making-", dir=place.parent)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(asdict(curves), file)
    os.replace(name, place)


@contextmanager
def _locked(file: Path, wait: bool) -> Iterator[bool]:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = file.open("w")
    except OSError as error:
        advice = "Set LEVELHEAD_CACHE to a directory that can be written to"
        wanted = "a directory for trainings"
        raise LevelheadValueError(expected("cache", wanted, error, advice)) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def _place(plan: Plan) -> Path:
    key = hashlib.blake2b(digest_size=12)
    key.update(json.dumps([asdict(plan), *_foundation()], sort_keys=True).encode())
    return directory() / f"{plan.task}-{key.hexdigest()}.json"


@cache
def _foundation() -> list[Any]:
    """What curves follow from, besides their plan."""
    here = Path(tasks.__file__).parent
    code = [hashlib.blake2b((here / name).read_bytes()).hexdigest() for name in _CODE]
    return [code, __version__, metadata.version("torch"), platform.python_version()]


def _require_torch() -> None:
    if find_spec("torch") is None:
        raise UndecidedError('training needs PyTorch: pip install "levelhead[torch]"')


def _named(plan: Plan) -> str:
    layers = f"{plan.depth} layer{'s' * (plan.depth != 1)}"
    return f"{plan.examples} {plan.task}, {plan.rule}, d_k {plan.d_k}, {layers}, seed {plan.seed}"
