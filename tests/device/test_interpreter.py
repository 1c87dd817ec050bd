"""The Triton kernel is tested in a process of its own: the interpreter must be chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

needs_triton = pytest.mark.needs("the Triton kernel", None if find_spec("triton") else "triton")


@needs_triton
@pytest.mark.timeout(600)
def test_under_the_interpreter() -> None:
    here = Path(__file__).parent
    files = [str(here / name) for name in ("interpreted.py", "interpreted_operator.py", "interpreted_sight.py")]
    chosen = {"TRITON_INTERPRET": "1", "LEVELHEAD_OBSERVE": "triton", "PYTHONPATH": str(here)}
    own = os.environ | chosen | {"PYTHONPATH": os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files]
    done = subprocess.run(command, env=own, cwd=here.parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-12000:] + done.stderr[-4000:]
    assert "skipped" not in done.stdout.splitlines()[-1]
