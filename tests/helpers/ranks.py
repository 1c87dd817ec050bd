"""Processes that are ranks of torch.distributed, for tests: started once, given many things to do.

Holds no test. What a rank is to do is a function of a test module, called with its rank and what
the test passes; what it returns, or the error it raises, comes back.
"""

from __future__ import annotations

import os
import pickle
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

# One process per test run has imported these; every rank is forked off it, before any thread. An interpreter of its own
# would take each rank some seconds.
PRELOADED = ["torch.distributed", "torch.autograd", "levelhead.torch", "levelhead.distributed", "levelhead.watching"]
TIMEOUT = 120.0  # seconds; a machine under load is slow, a hang is still noticed


@dataclass(frozen=True)
class Failure:
    """An error that a rank raised."""

    kinds: tuple[str, ...]  # its class and those above it
    message: str
    trace: str


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def serve(rank: int, world: int, port: int, pipe: Any, timeout: float) -> None:
    """A rank's life: does what it is told until it is told nothing."""
    torch.set_num_threads(1)
    meet(rank, world, port, timeout)
    pipe.send(pickle.dumps("ready"))
    while (told := pipe.recv()) is not None:
        function, given = told
        try:
            pipe.send(pickle.dumps(function(rank, *given)))  # by value, not as shared memory
        except Exception as error:
            kinds = tuple(kind.__name__ for kind in type(error).__mro__)
            pipe.send(pickle.dumps(Failure(kinds, str(error), traceback.format_exc())))
    if dist.is_initialized():
        dist.destroy_process_group()


def meet(rank: int, world: int, port: int, timeout: float = TIMEOUT) -> None:
    """Joins the ranks that meet at a port of this machine."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )


class Ranks:
    """So many processes, one group of all of them."""

    def __init__(self, world: int, timeout: float = TIMEOUT) -> None:
        self.world = world
        context = processes.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        port = free_port()
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, world, port, theirs, timeout), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        for pipe in self.pipes:
            assert self._heard(pipe) == "ready"

    def tell(self, function: Callable[..., Any], *given: Any) -> None:
        """All ranks begin function(rank, *given)."""
        for pipe in self.pipes:
            pipe.send((function, given))

    def hear(self, rank: int) -> Any:
        """What a rank returned, or its Failure."""
        return self._heard(self.pipes[rank])

    def failures(self, function: Callable[..., Any], *given: Any) -> list[Failure]:
        """Every rank's error; it is a failure of the test if one has none."""
        self.tell(function, *given)
        found = [self.hear(rank) for rank in range(self.world)]
        assert all(isinstance(x, Failure) for x in found), found
        return found

    def run(self, function: Callable[..., Any], *given: Any) -> list[Any]:
        """What every rank returned; an error of one is an error here."""
        self.tell(function, *given)
        found = [self.hear(rank) for rank in range(self.world)]
        for rank, x in enumerate(found):
            assert not isinstance(x, Failure), f"rank {rank}: {x.trace}"
        return found

    def drop_last(self) -> None:
        """Forgets the last rank, which is dead."""
        self.world -= 1
        self.pipes.pop().close()
        self.processes.pop()

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                pipe.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()

    @staticmethod
    def _heard(pipe: Any) -> Any:
        assert pipe.poll(2 * TIMEOUT), "a rank says nothing: it hangs"
        return pickle.loads(pipe.recv())
