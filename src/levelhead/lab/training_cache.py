"""Trainings by plan, each done once: kept on disk, and shared by all claims and processes.

The key is the plan and everything its curves follow from: the code of tasks, model and training, and the versions
beneath. A file appears by a rename, whole or not at all. Processes that want the same trainings divide them: a process
that finds one locked takes the next, and returns for it.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from levelhead import cache
from levelhead._version import __version__
from levelhead.extras import command, installed
from levelhead.lab import tasks
from levelhead.lab.claim import Tell, UndecidedError
from levelhead.lab.plan import Curves, Plan
from levelhead.lab.seeds import Training as Run
from levelhead.words import plural

_CODE = ("plan.py", "tasks.py", "training.py", "transformer.py")


def trained(plans: Sequence[Plan], tell: Tell) -> list[Run]:
    """Every plan's curves, in order; what is missing is trained and kept."""
    if not installed("torch"):
        raise UndecidedError(f"training needs PyTorch: {command('torch')}")
    wanted = list(dict.fromkeys(plans))
    curves_of: dict[Plan, Curves] = {}
    for wait in (False, True):
        for plan in (x for x in wanted if x not in curves_of):
            name = f"{plan.examples} {plan.task}, {plan.rule}, d_k {plan.d_k}, {plural(plan.depth, 'layer')}"
            tell(len(curves_of) / len(wanted), f"{name}, seed {plan.seed}")
            curves = _kept(plan) or _made(plan, wait)
            if curves is not None:
                curves_of[plan] = curves
    tell(1.0, f"{len(wanted)} trainings")
    return [Run(plan, curves_of[plan]) for plan in plans]


def directory() -> Path:
    return cache.directory("lab", "training")


def forget() -> None:
    """Removes everything that is kept, as `--fresh` demands."""
    shutil.rmtree(directory(), ignore_errors=True)


def _made(plan: Plan, wait: bool) -> Curves | None:
    """Trained here, unless another process is at it (then waited for, or None)."""
    with cache.locked(_place(plan).with_suffix(".lock"), wait=wait) as ours:
        if not ours:
            return None
        curves = _kept(plan)  # by the process that we waited for
        if curves is None:
            from levelhead.lab.training import train

            curves = train(plan)
            _keep(plan, curves)
        return curves


def _kept(plan: Plan) -> Curves | None:
    try:
        return Curves(**json.loads(_place(plan).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # not there, or damaged: to be made again
        return None


def _keep(plan: Plan, curves: Curves) -> None:
    try:
        cache.write_whole(_place(plan), json.dumps(asdict(curves)))
    except OSError as error:  # the minutes of training are not lost for that
        warnings.warn(f"{plan.task} will be trained again next time: {error}", stacklevel=2)


def _place(plan: Plan) -> Path:
    key = json.dumps([asdict(plan), *_foundation()], sort_keys=True).encode()
    return directory() / f"{plan.task}-{hashlib.blake2b(key, digest_size=12).hexdigest()}.json"


@lru_cache
def _foundation() -> list[Any]:
    """What curves follow from, besides their plan."""
    here = Path(tasks.__file__).parent
    code = [hashlib.blake2b((here / name).read_bytes()).hexdigest() for name in _CODE]
    return [code, __version__, metadata.version("torch"), platform.python_version()]
