"""The whole comparison of the Triton kernels with `lh.reference`, under Triton's interpreter.

Runs tests/device with LEVELHEAD_SWEEP=1: every option alone, every pair, in every type, all widths, splits, hidden NaN.
Writes how many cases passed, and of every statistic the largest error, also as a part of its bound. No times.

    python bench/device_sweep.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

os.environ |= {"TRITON_INTERPRET": "1", "LEVELHEAD_OBSERVE": "triton", "LEVELHEAD_SWEEP": "1"}  # read at import
ROOT = Path(__file__).resolve().parent.parent
DEVICE = ROOT / "tests" / "device"
sys.path[:0] = [str(DEVICE), str(ROOT / "tests" / "helpers")]

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import triton  # noqa: E402

import support  # noqa: E402
from about import machine, versions  # noqa: E402


class Sweep:
    """Counts cases by test, and keeps the largest error of every statistic."""

    def __init__(self) -> None:
        self.passed: Counter[str] = Counter()
        self.failed: list[str] = []
        self.rows: Counter[str] = Counter()
        self.largest: dict[str, float] = {}
        self.of_bound: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.when == "call":
            self.passed[report.nodeid.split("::")[1].split("[")[0]] += 1

    def within(self, given: Any, wanted: Any, bound: Any, what: str) -> None:
        some = np.isfinite(wanted) & np.isfinite(given)
        error = np.abs(given - wanted, where=some, out=np.zeros(wanted.shape))
        part = error / np.maximum(bound, 1e-30)
        self.rows[what] += int(some.sum())
        size = 1 + np.abs(wanted, where=some, out=np.zeros(wanted.shape))
        self.largest[what] = max(self.largest.get(what, 0.0), float((error / size).max(initial=0.0)))
        self.of_bound[what] = max(self.of_bound.get(what, 0.0), float(part.max(initial=0.0)))
        checked(given, wanted, bound, what)


checked = support.within


def main() -> None:
    parser = argparse.ArgumentParser(description="the Triton kernels against the reference, in all cases")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    sweep = Sweep()
    support.within = sweep.within
    files = [str(DEVICE / name) for name in ("interpreted.py", "interpreted_operator.py")]
    code = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore", *files], plugins=[sweep])
    names = {
        name: {"rows": n, "error": sweep.largest[name], "of bound": sweep.of_bound[name]}
        for name, n in sweep.rows.items()
    }
    lines = ["| statistic | rows compared | largest error / (1 + its size) | of its bound |", "|---|---|---|---|"]
    lines += [f"| {name} | {x['rows']} | {x['error']:.1e} | {x['of bound']:.0%} |" for name, x in names.items()]
    print("\n".join(lines))
    if options.json:
        about = machine(1) | versions() | {"triton": triton.__version__, "note": "interpreted on a CPU"}
        cases = {"cases": sum(sweep.passed.values()), "failed": sweep.failed, "by test": dict(sweep.passed)}
        result = {"about": about} | cases | {"statistics": names, "tables": {"errors": lines}}
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(int(code))


if __name__ == "__main__":
    main()
