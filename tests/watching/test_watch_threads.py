"""A watch of a model that several threads run at the same time, and of passes that are no part of a step."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import levelhead as lh
from levelhead.runs.record import Snapshot

THREADS, PASSES, WIDTH = 3, 4, 8


class Meeting(nn.Module):
    """Where the passes of all threads wait for each other."""

    def __init__(self, parties: int) -> None:
        super().__init__()
        self.barrier = threading.Barrier(parties)

    def forward(self, x: Tensor) -> Tensor:
        self.barrier.wait(30)
        return x


def made(parties: int) -> nn.Module:
    torch.manual_seed(0)
    attention = (lh.torch.MultiHeadAttention(WIDTH, 2) for _ in range(2))
    return nn.Sequential(next(attention), Meeting(parties), next(attention)).eval()


def run(model: nn.Module, thread: int, passes: int) -> None:
    for _ in range(passes):
        model(torch.randn(1, 3 + thread, WIDTH))


def in_threads(model: nn.Module, passes: int) -> None:
    threads = [threading.Thread(target=run, args=(model, n, passes)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def rows(snapshots: Any) -> list[list[int]]:
    return [[int(record.heads.rows[0]) for record in snapshot.records] for snapshot in snapshots]


@pytest.mark.parametrize("every", [1, 2])
def test_passes_of_several_threads_are_steps_of_their_own(every: int) -> None:
    model, found = made(THREADS), list[Snapshot]()
    with lh.watch(model, every=every, rows=None, sinks=[found.append], deep=False) as watch:
        in_threads(model, PASSES)
        assert len(watch.run().snapshots) == THREADS * PASSES // every
    assert [snapshot.step for snapshot in found] == list(range(0, THREADS * PASSES, every))
    assert all(len(each) == 2 and each[0] == each[1] for each in rows(found))  # no pass is cut
    if every == 1:
        assert sorted(first for first, _ in rows(found)) == sorted([3, 4, 5] * PASSES)


def test_threads_of_one_step_are_added_up() -> None:
    model = made(THREADS)
    with lh.watch(model, rows=None, deep=False) as watch:
        for _ in range(2):
            in_threads(model, PASSES)
            watch.step()
    assert rows(watch.run().snapshots) == [[(3 + 4 + 5) * PASSES] * 2] * 2


def test_threads_that_are_gone_leave_their_steps() -> None:
    model, found = made(1), list[Snapshot]()
    with lh.watch(model, rows=None, sinks=[found.append], deep=False) as watch:
        for n in range(3):
            thread = threading.Thread(target=run, args=(model, n, 1))
            thread.start()
            thread.join()
        assert len(found) == 2 and rows([watch.last]) == [[5, 5]]
    assert rows(found) == [[3, 3], [4, 4], [5, 5]]


@pytest.mark.parametrize("options", [{}, {"training_only": True}, {"every": 3}])
def test_a_check_is_no_part_of_a_step(options: Any) -> None:
    model = made(1)
    model.train()
    x = torch.randn(1, 5, WIDTH)
    with lh.watch(model, **options) as watch, lh.remedies.QKClip(watch, 1e3, batch=x) as clip:
        assert not watch.run().snapshots
        model(x)
        watch.step()
        model(x)
        before = rows([watch.last]), watch.last.step
        clip.verify(torch.randn(1, 7, WIDTH))
        assert (rows([watch.last]), watch.last.step) == before
        watch.step()
        assert rows(watch.run().snapshots) == [[5, 5]] * (1 if "every" in options else 2)
