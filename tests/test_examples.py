"""Every file of examples/ runs as it stands, in an interpreter of its own, and says something."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parent.parent / "examples").glob("*.py"))


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 5


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_it_runs_and_is_short(file: Path, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()
    assert len(file.read_text().splitlines()) <= 60
    assert not list(tmp_path.iterdir()), "an example leaves nothing behind"
