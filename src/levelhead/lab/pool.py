"""Experiments side by side, each in a fresh interpreter with one thread.

A fresh interpreter rather than a fork: threads, torch's state and random numbers of the caller stay out of it, and a
script that uses the lab needs no `if __name__ == "__main__"`. When the generator is closed, by Ctrl-C or otherwise, its
processes are ended.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from levelhead.info import info

Message: TypeAlias = Mapping[str, Any]

# The path is the caller's, not what the interpreter would make of the current directory.
_START = "import sys; sys.path[:] = sys.argv[1:]; from levelhead.lab.worker import main; main()"
_ONE_THREAD = dict.fromkeys(
    ("LEVELHEAD_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"
)


@dataclass(frozen=True)
class Order:
    id: str
    module: str  # whose CLAIM is to be examined
    params: Mapping[str, Any]
    seed: int


def side_by_side(orders: Iterable[Order], jobs: int) -> Generator[tuple[str, Message], None, None]:
    """(id, message) as they come, from `jobs` workers at a time; a worker's last is its "exit"."""
    waiting = deque(orders)
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
                    yield from ((worker.order.id, message) for message in messages or ())
                    if messages is None:
                        ready.unregister(worker.answers)
                        del running[worker]
                        yield worker.order.id, {"exit": worker.wait()}
        finally:
            for worker in running:
                worker.kill()


class _Worker:
    def __init__(self, order: Order) -> None:
        self.order = order
        self._unfinished = b""  # line
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | _ONE_THREAD | {"LEVELHEAD_ISA": info().isa},
            start_new_session=True,  # Ctrl-C is for the lab, which then ends its workers
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.answers = self._process.stdout
        with suppress(BrokenPipeError):  # a worker that is gone already shows by its exit
            self._process.stdin.write(json.dumps(asdict(order)).encode() + b"\n")
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
