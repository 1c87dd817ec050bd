"""Figures on demand: computed beside the server, two at a time, and kept for a while.

The core releases the interpreter lock while it works, so a thread is enough and the server stays responsive. Work of
seconds (a model, a measurement of speed) has a queue of its own and never takes both places.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

from levelhead.lab import figures
from levelhead.page.encoding import encoded

AT_ONCE = 2  # computations; the core's own threads come on top
KEPT = 512  # figures: minutes of moving sliders


class AbandonedError(Exception):
    """The client has gone: a slider moved on before this figure was begun."""


class Computing:
    """Answers as JSON, in bytes. One of these belongs to one server."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(AT_ONCE, "levelhead-page")
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._live = asyncio.Semaphore(1)
        self._begun: deque[Future[bytes]] = deque(maxlen=AT_ONCE)
        self._kept = lru_cache(KEPT)(_computed)

    async def figure(self, id: str, parameters: dict[str, Any], gone: Callable[[], Awaitable[bool]]) -> bytes:
        """The figure for those of the parameters that it needs."""
        needed = tuple((name, parameters[name]) for name in figures.NEEDS[id] if name in parameters)
        async with self._turns:
            if await gone():
                raise AbandonedError
            return await self._in_thread(partial(self._kept, id, needed))

    async def live(self, id: str, **parameters: Any) -> bytes:
        """A figure that is computed anew, one after the other."""
        async with self._live, self._turns:
            return await self._in_thread(partial(_computed, id, tuple(parameters.items())))

    @property
    def live_is_busy(self) -> bool:
        return self._live.locked()

    @property
    def is_busy(self) -> bool:
        """Whether a thread is at work, also for a client that no longer waits."""
        return any(not work.done() for work in self._begun)

    def end(self) -> None:
        """Waits for no thread; work that has not begun is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[[], bytes]) -> bytes:
        begun = self._threads.submit(work)
        self._begun.append(begun)
        return await asyncio.wrap_future(begun)


def _computed(id: str, parameters: tuple[tuple[str, Hashable], ...]) -> bytes:
    return encoded(figures.figure(id, **dict(parameters)).json())
