"""The cost of a distributed call: bytes sent and received, and time spent computing, in transfer and waiting.

Pass a `Trace` to a call and read it afterwards; several calls add up. Without one nothing is timed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock


@dataclass(frozen=True, slots=True)
class Event:
    """An activity from `begin` to `end`, in seconds of time.perf_counter."""

    kind: str  # "compute", "transfer" or "wait"
    what: str
    begin: float
    end: float


@dataclass
class Trace:
    """Counters and events of one or several calls, on this rank."""

    sent: int = 0  # bytes, without the overhead of the back end
    received: int = 0
    events: list[Event] = field(default_factory=list)
    _lock: Lock = field(default_factory=Lock, repr=False)

    def seconds(self, kind: str) -> float:
        """Time spent on a kind of event. Transfers overlap with the rest."""
        return sum(event.end - event.begin for event in self.events if event.kind == kind)

    def note(self, kind: str, what: str, begin: float) -> None:
        """Adds an event that ends now."""
        with self._lock:  # transfers are added by the threads that wait for them
            self.events.append(Event(kind, what, begin, time.perf_counter()))

    def moved(self, *, sent: int, received: int) -> None:
        """Adds bytes."""
        self.sent += sent
        self.received += received


@contextmanager
def timed(trace: Trace | None, kind: str, what: str) -> Iterator[None]:
    """Adds the block's duration to the trace, if there is one."""
    begin = time.perf_counter()
    try:
        yield
    finally:
        if trace is not None:
            trace.note(kind, what, begin)
