"""A test that leaves a watch attached fails itself, and the watch is detached: it would change the tests after it."""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import Any

import pytest

_BEFORE = pytest.StashKey[int]()


def holders() -> int:
    """How many watches hold the wrappers of attention functions."""
    loaded = sys.modules.get("levelhead.watching.intercept")
    return 0 if loaded is None else loaded.INTERCEPTION._holders


def detached() -> list[str]:
    """Detaches every watch, and returns the classes of their models."""
    from levelhead.watching.module_stack import WATCHED_MODULES

    watches: dict[int, Any] = {id(watched.watch): watched.watch for watched in WATCHED_MODULES.values()}
    for watch in watches.values():
        watch.detach()
    return [type(watch.model).__name__ for watch in watches.values()]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    item.stash[_BEFORE] = holders()  # those of fixtures that several tests share


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    yield
    if holders() > item.stash.get(_BEFORE, 0):
        pytest.fail(f"a watch is still attached after the test: {', '.join(detached())}")
