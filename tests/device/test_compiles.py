"""The kernels compile for GPUs that are not here: three of them now, and all targets, widths and sets of options when
`python bench/device_kernel.py` wrote its committed result.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

# Bytes that a block may have: CUDA C Programming Guide, table of compute capabilities; AMD's ISA guides
SHARED = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536}
FURTHER = {"sm_75": 65_536} | dict.fromkeys(("sm_86", "sm_89", "sm_120"), 101_376)
FURTHER |= dict.fromkeys(("gfx90a", "gfx1100", "gfx1201"), 65_536)
INSTRUCTIONS = {"sm_80": "mma.sync", "sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma", "gfx942": "v_mfma"}
INSTRUCTIONS |= dict.fromkeys(("sm_86", "sm_89", "sm_120"), "mma.sync")
INSTRUCTIONS |= {"gfx90a": "v_mfma", "gfx1100": "v_wmma", "gfx1201": "v_wmma"}
SPILLS = ("sm_75", "gfx1100")  # too few registers for some sets of options: the kernel keeps some numbers in memory


def judged(kernels: list[dict[str, Any]]) -> None:
    for kernel in kernels:
        target, name = kernel["target"], f"{kernel['target']} {kernel['D']} {kernel['dtype']} {kernel['options']}"
        assert target in SPILLS or kernel["spills"] == kernel["stack"] == 0, name
        assert kernel["shared"] <= (SHARED | FURTHER)[target], name
        if kernel["dtype"] != "fp32" and kernel["rows"] > 16 and target in INSTRUCTIONS:
            assert INSTRUCTIONS[target] in kernel["tensor"], name


@pytest.mark.needs("compiling Triton kernels", None if find_spec("triton") else "triton")
def test_a_sample_compiles(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    command = [sys.executable, str(root / "bench" / "device_kernel.py"), "--sample", "--json", str(tmp_path / "found")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = json.loads((tmp_path / "found").read_text())["kernels"]
    assert len(kernels) == 3
    judged(kernels)


def test_the_committed_result_is_whole_and_without_spills(root: Path) -> None:
    found = json.loads((root / "bench" / "results" / "device-kernel.json").read_text())
    assert {(x["target"], x["D"]) for x in found["flash"]} == {(t, D) for t in SHARED for D in (64, 128, 256)}
    of_bf16 = [
        x for x in found["kernels"] if x["dtype"] == "bf16" and x["target"] in SHARED and x["D"] in (64, 128, 256)
    ]
    assert len(of_bf16) == 4 * 3 * 10
    assert {x["target"] for x in found["kernels"]} == (SHARED | FURTHER).keys()
    judged(found["kernels"])


def test_the_committed_sweep_is_whole(root: Path) -> None:
    found = json.loads((root / "bench" / "results" / "device-sweep.json").read_text())
    assert not found["failed"] and found["by test"]["test_options_together"] > 250
    assert all(x["of bound"] < 1 and x["rows"] > 10_000 for x in found["statistics"].values())
