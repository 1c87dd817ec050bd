"""Snapshots and numbers on their way to the sinks of a watch, and what becomes of a sink's error.

In one process, and where each rank has a watch of its own, it is raised when all sinks have had the step. Where ranks
gather, rank 0 alone writes: if it raised alone, the others would wait for it in their next step until the group's
timeout. So the error waits for the next gathering, which takes place anyway, and every rank raises it there, when that
step has ended, too. After the last step nothing is gathered: `close` raises it, on rank 0.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from levelhead.runs.record import Snapshot
from levelhead.watching.attempts import Attempts
from levelhead.watching.ranks import Failure, Gathering


class Delivery:
    """Calls the sinks; `failure` is the first error that has not been raised yet."""

    def __init__(self, sinks: Sequence[Callable[[Snapshot], Any]], gathering: Gathering) -> None:
        self._all = sinks
        self._sinks = sinks if gathering.first else ()
        self._defers = gathering.active
        self.failure: Failure | None = None

    def __call__(self, snapshot: Snapshot) -> None:
        """A step that has ended."""
        with Attempts() as attempt:
            for sink in self._sinks:
                attempt(self._call, sink, snapshot.step, sink, snapshot)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step, for sinks that take them."""
        with Attempts() as attempt:
            for sink in self._sinks:
                if (log := getattr(sink, "log", None)) is not None:
                    attempt(self._call, sink, step, log, step, values)

    def take_failure(self) -> Failure | None:
        """The error that every rank is about to raise."""
        failure, self.failure = self.failure, None
        return failure

    def close(self) -> None:
        """Closes the sinks. An error that is left is raised, unless another is on its way."""
        other = sys.exc_info()[0]
        with Attempts() as attempt:
            for sink in self._all:
                attempt(getattr(sink, "close", lambda: None))
            if (failure := self.take_failure()) is not None and other is None:
                attempt(failure.throw)

    def _call(self, sink: Any, step: int, call: Callable[..., Any], *given: Any) -> None:
        if not self._defers:
            call(*given)
            return
        try:
            call(*given)
        except Exception as error:
            name, said = getattr(sink, "__qualname__", type(sink).__qualname__), " ".join(str(error).split())
            words = f"on rank 0 {type(error).__name__} of {name} in step {step}: {said}"
            self.failure = self.failure or Failure(words, error)
            advice = "every rank raises it in the next step that is gathered, or rank 0 when the watch ends"
            warnings.warn(f"levelhead: a sink failed {words}; {advice}", stacklevel=2)
