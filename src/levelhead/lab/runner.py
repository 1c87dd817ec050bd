"""Runs claims: looks into the cache, hands experiments to workers, compares verdicts.

Claims run side by side, each with one thread; results come in the order of the notes. Those that measure time come
last, one after the other, in this process, with every thread and nothing beside them. An experiment that crashes is an
error that names its claim, whatever the others found.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

from levelhead import cache
from levelhead.errors import LevelheadError, LevelheadValueError
from levelhead.lab import pool, registry, result_cache, settings
from levelhead.lab.claim import Params, Task
from levelhead.lab.result import Result, result_of

TellLab: TypeAlias = Callable[[str, float, str], None]  # id, share done, what is being done
SEEDS = 2**32
_JOBS = 2  # training claims need memory; `jobs` allows more


class CrashedError(LevelheadError):
    """An experiment ended in an error of its own, which is a defect of the lab."""


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
    cache.check_writable(result_cache.directory())  # before minutes of work
    return _results([Task(claim, chosen[claim.id], seed) for claim in claims], jobs, fresh, tell)


def _results(tasks: Sequence[Task], jobs: int, fresh: bool, tell: TellLab) -> Iterator[Result]:
    if fresh:
        for forget in {task.claim.forget for task in tasks if task.claim.forget}:
            forget()
    done = {} if fresh else dict(_kept(tasks))
    yield from _side_by_side([task for task in tasks if not task.claim.alone], done, jobs, tell)
    for task in (task for task in tasks if task.claim.alone):
        id = task.claim.id
        if id not in done:
            message = pool.perform(registry.MODULES[id], task.params, task.seed, partial(tell, id))
            done[id] = _finished(task, message)
        yield done[id]


def _kept(tasks: Sequence[Task]) -> Iterator[tuple[str, Result]]:
    for task in tasks:
        outcome = result_cache.load(task)
        if outcome is not None:
            yield task.claim.id, result_of(task, outcome)


def _side_by_side(tasks: Sequence[Task], done: dict[str, Result], jobs: int, tell: TellLab) -> Iterator[Result]:
    """Yields in the order of the tasks, each as soon as all before it are there."""
    messages = pool.side_by_side([task for task in tasks if task.claim.id not in done], jobs)
    try:
        for task in tasks:
            while task.claim.id not in done:
                performed, message = next(messages)
                id = performed.claim.id
                if "share" in message:
                    tell(id, message["share"], message["words"])
                elif id not in done:
                    done[id] = _finished(performed, message)
            yield done[task.claim.id]
    finally:
        messages.close()


def _finished(task: Task, message: pool.Message) -> Result:
    """The result from the last message about a task."""
    id = task.claim.id
    if "refused" in message:
        raise LevelheadValueError(f"{id}: {message['refused']}")
    if "crashed" in message:
        raise CrashedError(f"{id}: the experiment crashed.\n{message['crashed']}")
    if "exit" in message:
        raise CrashedError(f"{id}: its process ended with {message['exit']}, without a word.")
    result_cache.save(task, message["found"])
    return result_of(task, message["found"])


def _cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
