"""The group of ranks, as the plans use it: tensors are sent as bytes, every wait has a time limit, every failure is one
error.

It uses tensor collectives and plain sends and receives of torch.distributed; nothing is pickled. Tensors are sent as
bytes because not every back end supports every dtype. After an error the group must not be used again, since messages
in flight may still arrive. Make a new one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from levelhead.checks import number
from levelhead.distributed.trace import Trace, timed
from levelhead.errors import LevelheadValueError, expected
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
        self._watcher: Thread | None = None
        if wire.trace is not None and works:  # only a waiting thread can time the end of a transfer
            self._watcher = Thread(target=self._watch, args=(time.perf_counter(),), daemon=True)
            self._watcher.start()

    def wait(self) -> None:
        """Waits until everything has arrived or the time is up."""
        with timed(self._wire.trace, "wait", self._what):
            if self._watcher is None:
                self._finish()
            else:
                self._watcher.join()
        if self._error is not None:
            raise self._wire.lost(self._what, self._error) from self._error
        self._works, self._held = [], []

    def _finish(self) -> None:
        try:
            self._wire.finish(self._works)
        except RuntimeError as error:
            self._error = error

    def _watch(self, begin: float) -> None:
        self._finish()
        assert self._wire.trace is not None
        self._wire.trace.note("transfer", self._what, begin)


class Wire:
    """The ranks of a group, and how long to wait for them."""

    def __init__(self, group: Any, timeout: Any, trace: Trace | None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            advice = "Call torch.distributed.init_process_group first"
            wanted = "torch.distributed to be running"
            raise LevelheadValueError(expected("group", wanted, "no process group", advice))
        self.group: Any = dist.group.WORLD if group is None else group
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            advice = "Call only on the ranks of the group"
            raise LevelheadValueError(expected("group", "a group of mine", "another", advice))
        self.timeout = _span(timeout)
        self.trace = trace
        # The device that the back end needs; the kernel needs the CPU.
        self._device = torch.device("cuda" if dist.get_backend(self.group) == "nccl" else "cpu")

    # ---- collectives

    def gather(self, x: Tensor, what: str) -> list[Tensor]:
        """The x of every rank, all of one shape and dtype, in rank order."""
        mine = _bytes(x).to(self._device)
        parts = [torch.empty_like(mine) for _ in range(self.world)]
        begin = self._begin()
        self._wait(lambda: dist.all_gather(parts, mine, group=self.group, async_op=True), what)
        others = (self.world - 1) * mine.numel()
        self._moved(what, begin, sent=others, received=others)
        return [part.cpu().view(x.dtype).view(x.shape) for part in parts]

    def exchange(self, parts: Sequence[Tensor], numbers: Sequence[int], what: str) -> list[Tensor]:
        """Sends parts[r] to rank r; returns the received flat tensors of `numbers` elements, in rank order."""
        dtype, size = parts[0].dtype, parts[0].element_size()
        packed = torch.cat([_bytes(part) for part in parts]).to(self._device)
        leaving = [part.numel() * size for part in parts]
        coming = [n * size for n in numbers]
        room = packed.new_empty(sum(coming))
        begin = self._begin()
        self._wait(lambda: dist.all_to_all_single(room, packed, coming, leaving, group=self.group, async_op=True), what)
        mine = leaving[self.rank]
        self._moved(what, begin, sent=sum(leaving) - mine, received=sum(coming) - mine)
        return [part.view(dtype) for part in torch.split(room.cpu(), coming)]

    # ---- from rank to rank

    def hear(self, x: Tensor, what: str) -> list[Tensor]:
        """`gather` for a few numbers: the same bytes in ⌈log₂ world⌉ messages.

        Every rank sends to the rank 1, 2, 4, ... places after it what it has by then and that one lacks: its own
        numbers and those of ranks before it.
        """
        known = _bytes(x).to(self._device)[None]
        begin, until = self._begin(), self._deadline()
        for bit in range((self.world - 1).bit_length()):
            sent = known[: self.world - 2**bit]
            received = torch.empty_like(sent)
            try:
                self.finish(self._post(sent, received, 2**bit, _HEARING + bit), until)
            except RuntimeError as error:
                raise self.lost(what, error) from error
            known = torch.cat([known, received])
        others = (self.world - 1) * known.shape[1]
        self._moved(what, begin, sent=others, received=others)
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
        operations = [
            dist.P2POp(operation, x, self._peer((self.rank + distance) % self.world), self.group, tag)
            for operation, x, distance in ((dist.irecv, room, -step), (dist.isend, leaving, step))
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
        return LostRankError(
            expected(
                "group",
                f"ranks {others} to take part in {what}",
                f"on rank {self.rank}: {reason}",
                "A rank died, raised an error or is too slow: see its own output; make a new group",
            )
        )

    def _peer(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)

    def _begin(self) -> float:
        return time.perf_counter()

    def _wait(self, start: Any, what: str) -> None:
        try:
            self.finish([start()])
        except RuntimeError as error:
            raise self.lost(what, error) from error

    def _moved(self, what: str, begin: float, *, sent: int, received: int) -> None:
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
    what, advice = "seconds above 0", "Leave it out for the group's own"
    seconds = number("timeout", timeout, what, advice)
    if seconds <= 0:
        raise LevelheadValueError(expected("timeout", what, seconds, advice))
    return timedelta(seconds=seconds)
