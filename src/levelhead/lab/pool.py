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
import signal
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from contextlib import suppress
from importlib import import_module
from queue import SimpleQueue
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
    arrived: _Arrived = SimpleQueue()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running[_Worker(waiting.popleft(), arrived)] = None
            worker, message = arrived.get()
            if message is None:
                del running[worker]
                message = {"exit": worker.wait()}
            yield worker.task, message
    finally:
        for worker in running:
            worker.kill()


class _Worker:
    def __init__(self, task: Task, arrived: _Arrived) -> None:
        self.task = task
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | _ONE_THREAD | {"LEVELHEAD_ISA": info().isa},
            start_new_session=True,  # Ctrl-C is for the lab, which then ends its workers
        )
        # A thread for each: Windows cannot wait for several pipes at once.
        self._listener = threading.Thread(target=self._listen, args=(arrived,), daemon=True)
        self._listener.start()
        assert self._process.stdin is not None
        order = {"module": registry.MODULES[task.claim.id], "params": dict(task.params), "seed": task.seed}
        with suppress(BrokenPipeError):  # a worker that is gone already shows by its exit
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def _listen(self, arrived: _Arrived) -> None:
        """Passes the messages on; None once there will be no more."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.endswith(b"\n"):  # else it died in the middle of it
                arrived.put((self, json.loads(line)))
        arrived.put((self, None))

    def wait(self) -> int:
        code = self._process.wait()  # first: closing its stdin would end it with a code of ours
        self._listener.join()
        with suppress(BrokenPipeError), self._process:
            pass  # closes the pipes
        return code

    def kill(self) -> None:
        """Ends it and, where it leads a session of its own, whatever it started."""
        with suppress(ProcessLookupError):
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, signal.SIGKILL)
            else:  # Windows
                self._process.kill()
        self.wait()


_Arrived: TypeAlias = "SimpleQueue[tuple[_Worker, Message | None]]"


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
