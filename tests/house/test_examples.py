"""Every file of examples/ runs in a separate interpreter, and prints something."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.py"))


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 5


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_it_runs_and_is_short(file: Path, tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()
    assert len(file.read_text().splitlines()) <= 60
    assert not list(tmp_path.iterdir()), "an example leaves nothing behind"


def test_long_context_on_two_processes(root: Path, tmp_path: Path) -> None:
    """Started by torchrun, as in its docstring."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [sys.executable, *launch, str(root / "examples" / "long_context.py")],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert run.returncode == 0, run.stderr
    said = sorted(re.findall("rank . of 2: 50. to", run.stdout))  # two processes may write into one line
    assert said == ["rank 0 of 2: 501 to", "rank 1 of 2: 500 to"]
