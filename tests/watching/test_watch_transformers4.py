"""Models of transformers 4, which gets its attention functions in another way than version 5.

They run in a process of their own, with the version that `make test` puts beside the environment
(or that LEVELHEAD_TRANSFORMERS4 names the directory of).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from levelhead.watching.effective_scale import NOT_FOLLOWED
from tiny_models import MODELS

SECOND = Path(os.environ.get("LEVELHEAD_TRANSFORMERS4") or f"{sys.prefix}-transformers4")


@pytest.fixture(scope="module")
def lines(root: Path) -> dict[tuple[str, str, bool], dict[str, Any]]:
    assert SECOND.is_dir(), f"{SECOND} is missing: make test installs it"
    path = os.pathsep.join([str(SECOND), *filter(None, [os.environ.get("PYTHONPATH")])])
    script = root / "tests" / "helpers" / "watch_transformers4.py"
    done = subprocess.run(
        [sys.executable, str(script)], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {tuple(line["case"]): line for line in found}


@pytest.mark.parametrize(
    ("name", "implementation", "served"),
    [
        ("Llama", "eager", False),
        ("BERT", "eager", False),
        ("Gemma-2", "eager", False),
        ("Llama", "sdpa", False),
        ("BERT", "sdpa", False),
        ("Gemma-2", "sdpa", False),
        ("Llama", "sdpa", True),
        ("BERT", "sdpa", True),
    ],
)
def test_seen_attributed_and_bit_identical(
    lines: dict[tuple[str, str, bool], dict[str, Any]], name: str, implementation: str, served: bool
) -> None:
    line = lines[name, implementation, served]
    assert line["version"].startswith("4.57.")
    # BERT has its own code still: it calls torch's function itself, or forms the softmax by hand.
    interface = "huggingface:" if name != "BERT" or implementation == "eager" else ""
    levelheads = ", levelhead" if served and interface else ""
    assert line["how"] == [f"{interface}{implementation}{levelheads}"]
    assert line["modules"] == sorted(MODELS[name].modules)
    assert line["heads"] == [4]
    assert line["kv_heads"] == [4 if name == "BERT" else 2]
    assert line["softcap"] == [50.0 if (name, implementation) == ("Gemma-2", "eager") else 0.0]
    by_hand = (name, implementation) == ("BERT", "eager")
    assert line["readings"] == [NOT_FOLLOWED if by_hand else "projections"]
    assert not line["unseen"] and line["identical"] and line["restored"]
