"""The group of ranks, as the plans use it: tensors are sent as bytes, every wait has a time limit, every failure is one
error.

It uses tensor collectives and plain sends and receives of torch.distributed; nothing is pickled. Tensors are sent as
bytes because not every back end supports every dtype. After an error the group must not be used again, since messages
in flight may still arrive. Make a new one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from levelhead.checks import number
from levelhead.distributed.trace import Trace, timed
from levelhead.errors import bad_value, expected
from levelhead.torch.operators import LevelheadRuntimeError

_HEARING = 2**20  # tags of the messages of `hear`, above those of any ring
_LEAST = 0.001  # seconds; the shortest wait


class LostRankError(LevelheadRuntimeError):
    """A rank did not answer: it died, is in another call, or is too slow."""


class Pending:
    """Transfers in progress. Their memory is kept until they are done."""

    def __init__(self, wire: Wire, works: list[Any], held: list[Tensor], what: str) -> None:
        self._wire, self._works, self._held, self._what = wire, works, held, what
        self._error: RuntimeError | None = None
        self._begin = time.perf_counter()
        self._watcher: Thread | None = None
        if wire.trace is not None and works:  # only a waiting thread can time the end of a transfer
            self._watcher = Thread(target=self._finish, args=(wire.trace,), daemon=True)
            self._watcher.start()

    def wait(self) -> None:
        """Waits until everything has arrived or the time is up."""
        with timed(self._wire.trace, "wait", self._what):
            if self._watcher is None:
                self._finish(None)
            else:
                self._watcher.join()
        if self._error is not None:
            raise self._wire.lost(self._what, self._error) from self._error
        self._works, self._held = [], []

    def _finish(self, trace: Trace | None) -> None:
        try:
            self._wire.finish(self._works)
        except RuntimeError as error:
            self._error = error
        if trace is not None:
            trace.note("transfer", self._what, self._begin)


class Wire:
    """The ranks of a group, and how long to wait for them."""

    def __init__(self, group: Any, timeout: Any, trace: Trace | None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            advice = "Call torch.distributed.init_process_group first"
            raise bad_value("group", "torch.distributed to be running", "no process group", advice)
        self.group: Any = dist.group.WORLD if group is None else group
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise bad_value("group", "a group of mine", "another", "Call only on the ranks of the group")
        self.timeout = _span(timeout)
        self.trace = trace
        # The device that the back end needs; the kernel needs the CPU.
        self._device = torch.device("cuda" if dist.get_backend(self.group) == "nccl" else "cpu")

    # ---- collectives

    def gather(self, x: Tensor, what: str) -> list[Tensor]:
        """The x of every rank, all of one shape and dtype, in rank order."""
        mine = _bytes(x).to(self._device)
        parts = [torch.empty_like(mine) for _ in range(self.world)]
        others = (self.world - 1) * mine.numel()
        with self._transfer(what, sent=others, received=others):
            self.finish([dist.all_gather(parts, mine, group=self.group, async_op=True)])
        return [part.cpu().view(x.dtype).view(x.shape) for part in parts]

    def exchange(self, parts: Sequence[Tensor], numbers: Sequence[int], what: str) -> list[Tensor]:
        """Sends parts[r] to rank r; returns the received flat tensors of `numbers` elements, in rank order."""
        dtype, size = parts[0].dtype, parts[0].element_size()
        packed = torch.cat([_bytes(part) for part in parts]).to(self._device)
        leaving = [part.numel() * size for part in parts]
        coming = [n * size for n in numbers]
        room = packed.new_empty(sum(coming))
        mine = leaving[self.rank]
        with self._transfer(what, sent=sum(leaving) - mine, received=sum(coming) - mine):
            self.finish([dist.all_to_all_single(room, packed, coming, leaving, group=self.group, async_op=True)])
        return [part.view(dtype) for part in torch.split(room.cpu(), coming)]

    # ---- from rank to rank

    def hear(self, x: Tensor, what: str) -> list[Tensor]:
        """`gather` for a few numbers: the same bytes in ⌈log₂ world⌉ messages.

        Every rank sends to the rank 1, 2, 4, ... places after it what it has by then and that one lacks: its own
        numbers and those of ranks before it.
        """
        known = _bytes(x).to(self._device)[None]
        others, until = (self.world - 1) * known.shape[1], self._deadline()
        with self._transfer(what, sent=others, received=others):
            for bit in range((self.world - 1).bit_length()):
                sent = known[: self.world - 2**bit]
                received = torch.empty_like(sent)
                self.finish(self._post(sent, received, 2**bit, _HEARING + bit), until)
                known = torch.cat([known, received])
        by_rank = [known[(self.rank - rank) % self.world] for rank in range(self.world)]
        return [one.cpu().view(x.dtype).view(x.shape) for one in by_rank]

    def shift(self, leaving: Tensor, room: Tensor, tag: int, what: str) -> Pending:
        """Sends to the next rank and receives from the one before; empty shards are not sent."""
        source, target = _bytes(leaving), _bytes(room)
        try:
            works = self._post(source, target, 1, tag)
        except RuntimeError as error:
            raise self.lost(what, error) from error
        if self.trace is not None:
            self.trace.moved(sent=source.numel(), received=target.numel())
        return Pending(self, works, [source, target], what)

    def _post(self, leaving: Tensor, room: Tensor, step: int, tag: int) -> list[Any]:
        """Sends to the rank `step` places after, receives from the one `step` places before. The receive comes first;
        both are one batch, without which two ranks of NCCL would wait for each other."""
        before, after = (dist.get_global_rank(self.group, (self.rank + x) % self.world) for x in (-step, step))
        operations = [
            dist.P2POp(operation, x, peer, self.group, tag)
            for operation, x, peer in ((dist.irecv, room, before), (dist.isend, leaving, after))
            if x.numel()
        ]
        return list(dist.batch_isend_irecv(operations)) if operations else []

    def buffer(self, numbers: int, dtype: torch.dtype) -> Tensor:
        """Memory that the back end can send from and receive into."""
        return torch.empty(numbers, dtype=dtype, device=self._device)

    # ---- waiting, errors, trace

    def finish(self, works: Sequence[Any], until: float | None = None) -> None:
        """Waits until all works are done; `until` is the time limit of all of them together."""
        until = self._deadline() if until is None else until
        for work in works:
            if self.timeout is None:
                work.wait()
            else:
                work.wait(timedelta(seconds=max(until - time.monotonic(), _LEAST)))

    def _deadline(self) -> float:
        return time.monotonic() + (0.0 if self.timeout is None else self.timeout.total_seconds())

    def lost(self, what: str, error: BaseException) -> LostRankError:
        """The error for a wait that failed, with the back end's reason."""
        others = [rank for rank in range(self.world) if rank != self.rank]
        reason = " ".join(str(error).split())[:200]
        wanted = f"ranks {others} to take part in {what}"
        advice = "A rank died, raised an error or is too slow: see its own output; make a new group"
        return LostRankError(expected("group", wanted, f"on rank {self.rank}: {reason}", advice))

    @contextmanager
    def _transfer(self, what: str, *, sent: int, received: int) -> Iterator[None]:
        """The block waits for a transfer: adds it to the trace; a failure of the back end is a lost rank."""
        begin = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            raise self.lost(what, error) from error
        if self.trace is not None:
            self.trace.moved(sent=sent, received=received)
            self.trace.note("transfer", what, begin)
            self.trace.note("wait", what, begin)


def _bytes(x: Tensor) -> Tensor:
    """A tensor's elements in order, as bytes; a view where it is contiguous."""
    return x.detach().contiguous().view(-1).view(torch.uint8)


def _span(timeout: Any) -> timedelta | None:
    if timeout is None or isinstance(timeout, timedelta):
        return timeout
    advice = "Leave it out for the group's own"
    return timedelta(seconds=number("timeout", timeout, "seconds above 0", advice, lambda x: x > 0))
