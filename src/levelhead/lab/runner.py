"""Runs claims: looks into the cache, hands experiments to workers, compares verdicts.

Claims run side by side, each with one thread; results come in the order of the notes. Those that measure time come
last, one after the other, in this process, with every thread and nothing beside them. An experiment that crashes is an
error that names its claim, whatever the others found.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from levelhead.errors import LevelheadError, LevelheadValueError
from levelhead.lab import pool, registry, result_cache, settings, worker
from levelhead.lab.claim import Claim, Params
from levelhead.lab.result import Result, result_of

TellLab: TypeAlias = Callable[[str, float, str], None]  # id, share done, what is being done
SEEDS = 2**32
_JOBS = 2  # training claims need memory; `jobs` allows more


class CrashedError(LevelheadError):
    """An experiment ended in an error of its own, which is a defect of the lab."""


@dataclass(frozen=True)
class _Task:
    claim: Claim
    params: Params
    seed: int

    def result(self, found: Mapping[str, Any]) -> Result:
        return result_of(self.claim, self.params, self.seed, found)


def run(
    ids: str | Iterable[str] = registry.ALL,
    *,
    seed: int = 0,
    full: bool = False,
    params: Params = MappingProxyType({}),
    jobs: int | None = None,
    fresh: bool = False,
    tell: TellLab = lambda id, share, words: None,
) -> Iterator[Result]:
    """Examines claims; results come in the order of the notes, claims that measure time last.

    Args:
        ids: ids of claims, in any case, or "all".
        seed: of everything random.
        full: the sizes of the committed results instead of the quick ones.
        params: changes parameters of those chosen claims that have them.
        jobs: experiments side by side; default: two, or one where there is one CPU.
        fresh: measure even what is cached.
        tell: is called with (id, share done, current step).

    >>> [result.verdict for result in run("C4")]
    ['confirmed']
    """
    claims = registry.chosen(ids)
    seed = settings.whole("seed", seed, 0, SEEDS - 1)
    jobs = min(_JOBS, _cpus()) if jobs is None else settings.whole("jobs", jobs, 1, 1024)
    chosen = settings.applied(claims, params, full=full)
    result_cache.check()
    tasks = [_Task(claim, chosen[claim.id], seed) for claim in claims]
    return _results(tasks, jobs, fresh, tell)


def _results(tasks: Sequence[_Task], jobs: int, fresh: bool, tell: TellLab) -> Iterator[Result]:
    kept = {} if fresh else {task.claim.id: _kept(task) for task in tasks}
    if fresh:
        for forget in {task.claim.forget for task in tasks if task.claim.forget}:
            forget()
    together = [task for task in tasks if not task.claim.alone]
    yield from _side_by_side(together, kept, jobs, tell)
    for task in (task for task in tasks if task.claim.alone):
        yield kept.get(task.claim.id) or _alone(task, tell)


def _kept(task: _Task) -> Result | None:
    found = result_cache.load(task.claim, task.params, task.seed)
    return None if found is None else task.result(found)


def _side_by_side(
    tasks: Sequence[_Task], kept: Mapping[str, Result | None], jobs: int, tell: TellLab
) -> Iterator[Result]:
    """Yields in the order of the tasks, each as soon as all before it are there."""
    done = {id: result for id, result in kept.items() if result is not None}
    left = [task for task in tasks if task.claim.id not in done]
    orders = [pool.Order(task.claim.id, registry.MODULES[task.claim.id], task.params, task.seed) for task in left]
    by_id = {task.claim.id: task for task in left}
    messages = pool.side_by_side(orders, jobs)
    try:
        for task in tasks:
            while task.claim.id not in done:
                id, message = next(messages)
                if "share" in message:
                    tell(id, message["share"], message["words"])
                elif id not in done:
                    done[id] = _finished(by_id[id], message)
            yield done[task.claim.id]
    finally:
        messages.close()


def _finished(task: _Task, message: Mapping[str, Any]) -> Result:
    """The result from a worker's last message."""
    id = task.claim.id
    if "refused" in message:
        raise LevelheadValueError(f"{id}: {message['refused']}")
    if "crashed" in message:
        raise CrashedError(f"{id}: the experiment crashed.\n{message['crashed']}")
    if "exit" in message:
        raise CrashedError(f"{id}: its process ended with {message['exit']}, without a word.")
    result_cache.save(task.claim, task.params, task.seed, message["found"])
    return task.result(message["found"])


def _alone(task: _Task, tell: TellLab) -> Result:
    id = task.claim.id

    def tell_share(share: float, words: str) -> None:
        tell(id, share, words)

    try:
        message: dict[str, Any] = {"found": worker.perform(task.claim, task.params, task.seed, tell_share)}
    except LevelheadError as error:
        message = {"refused": str(error)}
    except Exception:
        message = {"crashed": traceback.format_exc()}
    return _finished(task, message)


def _cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
