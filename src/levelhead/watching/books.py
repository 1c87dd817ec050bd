"""The ledgers of the passes that run now, by thread.

Without `step()` every pass of the model is a step. Several threads may run it at the same time: each pass has a book,
and ends when its thread begins another one or is gone. Steps are numbered in the order in which they end. With `step()`
all threads write into the first book.
"""

from __future__ import annotations

import heapq
import sys
import threading

from levelhead.runs.record import Record
from levelhead.watching.module_stack import WatchedModule
from levelhead.watching.step_tallies import Ledger, Settings


class Book:
    """The ledgers of one step, by the number of the watched module."""

    def __init__(self) -> None:
        self.step = 0
        self.observed = True
        self._ledgers: dict[int, Ledger] = {}

    def ledger(self, watched: WatchedModule, watch: Settings) -> Ledger:
        if watched.number not in self._ledgers:
            self._ledgers[watched.number] = Ledger(watched, watch)
        return self._ledgers[watched.number]

    def records(self) -> tuple[Record, ...]:
        return tuple(record for ledger in self._ledgers.values() for record in ledger.records())

    def clear(self) -> None:
        for ledger in self._ledgers.values():
            ledger.clear()

    def let_go(self) -> None:
        for ledger in self._ledgers.values():
            ledger.let_go()


class Books:
    """Those of a watch. A book is used again when its pass has ended, with what its ledgers know of their modules."""

    def __init__(self) -> None:
        self.all = [Book()]
        self._of: dict[int, Book] = {}  # by thread, until its pass has ended
        self._numbers: list[int] = []  # of observed passes that have not ended, the smallest first

    def own(self) -> Book:
        """That of this thread's pass."""
        return self._of.get(threading.get_ident(), self.all[0])

    def step(self, otherwise: int) -> int:
        """The number with which this thread's pass began."""
        book = self._of.get(threading.get_ident())
        return otherwise if book is None else book.step

    def begin(self, step: int, observed: bool) -> None:
        """A pass begins in this thread."""
        book = next((one for one in self.all if one not in self._of.values()), None)
        if book is None:
            book = Book()
            self.all.append(book)
        book.step, book.observed = step, observed
        self._of[threading.get_ident()] = book
        if observed:
            heapq.heappush(self._numbers, step)

    def over(self) -> list[Book]:
        """Passes that have ended now that this thread begins one: its own, and those of threads that are gone."""
        own = threading.get_ident()
        running = sys._current_frames().keys() - {own} if self._of.keys() - {own} else set()
        return self._taken([thread for thread in self._of if thread not in running])

    def rest(self, step: int) -> list[Book]:
        """All that have not ended, which they do now; `step`: the number of what ran outside of passes."""
        open_ = self.open(step)
        self._taken(list(self._of))
        return open_

    def open(self, step: int) -> list[Book]:
        """The same, and they go on."""
        first, books = self.all[0], list(self._of.values())
        if first not in books:
            first.step = step
            books.append(first)
        return sorted(books, key=lambda book: book.step)

    def _taken(self, threads: list[int]) -> list[Book]:
        books = sorted((self._of.pop(thread) for thread in threads), key=lambda book: book.step)
        for book in books:
            if book.observed:
                book.step = heapq.heappop(self._numbers)
        return books
