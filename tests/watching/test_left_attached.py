"""The guard of conftest.py: a test that leaves a watch attached fails itself, and the next one begins without it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import nn

import levelhead as lh
from left_attached import holders, pytest_runtest_call, pytest_runtest_teardown


def ended(item: pytest.Item) -> Iterator[None]:
    end = pytest_runtest_teardown(item)
    next(end)
    return end


def test_a_watch_that_is_left_attached_fails_its_test_and_is_detached(request: pytest.FixtureRequest) -> None:
    pytest_runtest_call(request.node)
    w = lh.watch(nn.MultiheadAttention(4, 2))
    with pytest.raises(pytest.fail.Exception, match="still attached after the test: MultiheadAttention"):
        next(ended(request.node))
    assert not w.attached and holders() == 0
    with pytest.raises(StopIteration):
        next(ended(request.node))


def test_a_watch_that_several_tests_share_is_none_of_this_test(request: pytest.FixtureRequest) -> None:
    with lh.watch(nn.Linear(2, 2)) as w:
        pytest_runtest_call(request.node)
        with pytest.raises(StopIteration):
            next(ended(request.node))
        assert w.attached
    pytest_runtest_call(request.node)
