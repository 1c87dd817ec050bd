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
MISSING = [tool for tool in TOOLS if shutil.which(tool) is None]


def run(root: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    command = ["/bin/sh", str(root / "core" / "test" / "aarch64.sh")]
    env = {**os.environ, **changes}
    return subprocess.run(command, capture_output=True, text=True, timeout=800, env=env)


@pytest.mark.timeout(900)  # emulated: a minute of one core, and much more where others use it
@pytest.mark.needs("the core on aarch64 (core/test/aarch64.sh names the packages)", " and ".join(MISSING))
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
