"""Experiments side by side, each in a fresh interpreter with one thread: both ends of it.

A fresh interpreter rather than a fork: threads, torch's state and random numbers of the caller stay out of it, and a
script that uses the lab needs no `if __name__ == "__main__"`. A worker reads one task from stdin and writes messages to
stdout, a line of JSON each; what an experiment prints itself goes to stderr. Its stdin stays open as long as the lab
lives: when it closes, however the lab ended, the worker ends too. When the generator is closed, by Ctrl-C or otherwise,
its processes are ended.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any, TypeAlias

from levelhead.errors import LevelheadError
from levelhead.info import info
from levelhead.lab import registry
from levelhead.lab.claim import Outcome, Params, Task, Tell, UndecidedError
from levelhead.lab.result import outcome_json

# {"share", "words"} while it runs, then one of {"found"}, {"refused"} and {"crashed"}, then {"exit"}.
Message: TypeAlias = Mapping[str, Any]

# The path is the caller's, not what the interpreter would make of the current directory.
_START = "import sys; sys.path[:] = sys.argv[1:]; from levelhead.lab.pool import work; work()"
_ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("LEVELHEAD", "OMP", "MKL", "OPENBLAS")}


def perform(module: str, params: Params, seed: int, tell: Tell) -> Message:
    """Runs the experiment of a claim's module. Where a claim cannot be decided here, "undecided" is the outcome."""
    try:
        return {"found": outcome_json(import_module(module).CLAIM.experiment(params, seed, tell))}
    except UndecidedError as error:
        return {"found": outcome_json(Outcome(None, {"why": str(error)}, None, "undecided"))}
    except LevelheadError as error:
        return {"refused": str(error)}
    except Exception:
        return {"crashed": traceback.format_exc()}


# ---- in the lab's process ----------------------------------------------------


def side_by_side(tasks: Iterable[Task], jobs: int) -> Generator[tuple[Task, Message], None, None]:
    """Messages as they arrive, from `jobs` workers at a time; the last of each worker is its "exit"."""
    waiting = deque(tasks)
    running: dict[_Worker, None] = {}
    with selectors.DefaultSelector() as ready:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    worker = _Worker(waiting.popleft())
                    running[worker] = None
                    ready.register(worker.answers, selectors.EVENT_READ, worker)
                for key, _ in ready.select():
                    worker = key.data
                    messages = worker.listen()
                    yield from ((worker.task, message) for message in messages or ())
                    if messages is None:
                        ready.unregister(worker.answers)
                        del running[worker]
                        yield worker.task, {"exit": worker.wait()}
        finally:
            for worker in running:
                worker.kill()


class _Worker:
    def __init__(self, task: Task) -> None:
        self.task = task
        self._unfinished = b""  # line
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | _ONE_THREAD | {"LEVELHEAD_ISA": info().isa},
            start_new_session=True,  # Ctrl-C is for the lab, which then ends its workers
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self.answers = self._process.stdout
        order = {"module": registry.MODULES[task.claim.id], "params": dict(task.params), "seed": task.seed}
        with suppress(BrokenPipeError):  # a worker that is gone already shows by its exit
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def listen(self) -> list[Message] | None:
        """The messages that arrived; None once there will be no more."""
        chunk = os.read(self.answers.fileno(), 1 << 16)
        if not chunk:
            return None
        *lines, self._unfinished = (self._unfinished + chunk).split(b"\n")
        return [json.loads(line) for line in lines]

    def wait(self) -> int:
        code = self._process.wait()  # first: closing its stdin would end it with a code of ours
        with suppress(BrokenPipeError), self._process:
            pass  # closes the pipes
        return code

    def kill(self) -> None:
        """Ends it and whatever it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # it leads a session of its own
        self.wait()


# ---- in a worker's process ---------------------------------------------------


def work() -> None:
    """Performs the task on stdin."""
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_the_lab, daemon=True).start()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def send(message: Message) -> None:
        print(json.dumps(message, allow_nan=False), file=answers, flush=True)

    send(perform(**order, tell=lambda share, words: send({"share": float(share), "words": words})))


def _end_with_the_lab() -> None:
    sys.stdin.read()
    os._exit(1)
