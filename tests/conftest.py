"""What every test shares: Hypothesis without chance, a header that says what is under test, tests that are left out by
name where the machine lacks what they need, and a guard against watches that are left attached.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

import levelhead as lh
from left_attached import pytest_runtest_call as pytest_runtest_call
from left_attached import pytest_runtest_teardown as pytest_runtest_teardown
from levelhead.models import Opened
from needs import LEFT_OUT

# Before JAX starts: four devices on one CPU, for tests/jax; other tests use the first.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("KERAS_BACKEND", "jax")

# Derandomised: a failure today is the same failure tomorrow and on another machine. No deadline:
# a shared machine is slow now and then, and pytest's own timeout catches what hangs.
hypothesis.settings.register_profile("levelhead", derandomize=True, deadline=None)
hypothesis.settings.load_profile("levelhead")


def pytest_report_header() -> list[str]:
    return [f"levelhead from {Path(lh.__file__).parent}", *repr(lh.info()).splitlines()]


# ---- needs ------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    os.environ.pop("COLUMNS", None)  # reports are as wide as where no terminal is, in every process
    config.stash[LEFT_OUT] = {}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What is collected lives to the end: looking through all of it for garbage took a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Several processes share the tests out by name. An address in a name differs from process to process.
    unstable = [item.nodeid for item in items if re.search(r" at 0x[0-9a-f]+>", item.nodeid)]
    if unstable:
        raise pytest.UsageError(f"names of tests must be the same in every process; give ids= to {unstable[0]}")
    if os.environ.get("CI") == "true":  # everything is required: what is missing there is a failure
        return
    gone = []
    for item in items:
        marker = item.get_closest_marker("needs")
        if marker and marker.args[1]:
            gone.append(item)
            config.stash[LEFT_OUT][marker.args[0]] = marker.args[1]
    items[:] = [item for item in items if item not in gone]
    config.hook.pytest_deselected(items=gone)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for what, missing in sorted(config.stash[LEFT_OUT].items()):
        terminalreporter.write_line(f"left out: {what}, for want of {missing}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # one of several processes: only the first one writes the report
        session.config.workeroutput["left out"] = session.config.stash[LEFT_OUT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[LEFT_OUT].update(getattr(node, "workeroutput", {}).get("left out", {}))


# ---- fixtures ---------------------------------------------------------------


@pytest.fixture(scope="session")
def root() -> Path:
    """The project's directory."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session", autouse=True)
def cache(root: Path) -> Iterator[Path]:
    """The tests' own cache: kept between runs, gone with `make clean`, never the user's, in no test."""
    place, before = root / "build" / "cache", os.environ.get("LEVELHEAD_CACHE")
    os.environ["LEVELHEAD_CACHE"] = str(place)
    yield place
    if before is None:
        del os.environ["LEVELHEAD_CACHE"]
    else:
        os.environ["LEVELHEAD_CACHE"] = before


@pytest.fixture(scope="session")
def minilm() -> Opened:
    return lh.models.open("minilm")


@pytest.fixture(scope="session")
def smollm2() -> Opened:
    return lh.models.open("smollm2")
