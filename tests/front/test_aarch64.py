"""The core on aarch64: core/test/aarch64.sh cross-compiles its tests and runs them under qemu.

Without a cross compiler the test is deselected, with a line in the report; where CI=true the tools are required, and
missing ones are a failure.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

TOOLS = ("aarch64-linux-gnu-g++", "qemu-aarch64")
REQUIRED = os.environ.get("CI") == "true"
MISSING = [tool for tool in TOOLS if shutil.which(tool) is None]


class LeftOut:
    """A plugin of this run that deselects the test, visibly."""

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        gone = [item for item in items if item.name == test_core_passes_its_tests.__name__]
        items[:] = [item for item in items if item not in gone]
        config.hook.pytest_deselected(items=gone)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(
            f"left out: the core on aarch64, for want of {' and '.join(MISSING)} "
            "(core/test/aarch64.sh names the packages)"
        )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    plugins = metafunc.config.pluginmanager
    if MISSING and not REQUIRED and not plugins.has_plugin("left-out-aarch64"):
        plugins.register(LeftOut(), "left-out-aarch64")


def run(root: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    command = ["/bin/sh", str(root / "core" / "test" / "aarch64.sh")]
    env = {**os.environ, **changes}
    return subprocess.run(command, capture_output=True, text=True, timeout=250, env=env)


def test_core_passes_its_tests(root: Path) -> None:
    done = run(root)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "everything passed" in done.stdout


def test_without_its_tools_the_script_fails_and_names_the_packages(root: Path, tmp_path: Path) -> None:
    done = run(root, PATH=str(tmp_path))
    assert done.returncode != 0
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.endswith(" g++-aarch64-linux-gnu qemu-user")
