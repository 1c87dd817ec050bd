"""What every test shares: Hypothesis without chance, and a header that says what is under test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

import levelhead as lh
from levelhead.models import Opened

# Derandomised: a failure today is the same failure tomorrow and on another machine. No deadline:
# a shared machine is slow now and then, and pytest's own timeout catches what hangs.
hypothesis.settings.register_profile("levelhead", derandomize=True, deadline=None)
hypothesis.settings.load_profile("levelhead")


def pytest_report_header() -> list[str]:
    return [f"levelhead from {Path(lh.__file__).parent}", *repr(lh.info()).splitlines()]


@pytest.fixture(scope="session")
def root() -> Path:
    """The project's directory."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def cache(root: Path) -> Iterator[Path]:
    """The tests' own cache: kept between runs, gone with `make clean`, never the user's."""
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
def smollm2(cache: Path) -> Opened:
    return lh.models.open("smollm2")
