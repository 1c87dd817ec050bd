"""What every test shares: Hypothesis without chance, and a header that says what is under test."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest

import levelhead as lh

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
