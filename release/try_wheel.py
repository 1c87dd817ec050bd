"""Tries the levelhead that is installed: every instruction set that this machine may have was built, the tour runs, and
the core keeps its contracts. Beside NumPy it takes what NEEDS names, and neither torch nor jax.

    pip install levelhead-….whl $(python release/try_wheel.py --needs) && python release/try_wheel.py
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

NEEDS = ("pytest", "pytest-timeout", "hypothesis", "ml_dtypes")
TESTS = (
    "call/test_options.py", "call/test_scaling.py", "front/test_errors.py", "front/test_gradients.py",
    "front/test_guard_pages.py", "front/test_invariance.py", "front/test_isa.py", "front/test_query_lengths_core.py",
    "front/test_reference.py", "front/test_statistics.py", "front/test_stats.py", "front/test_threads.py",
)  # fmt: skip
BUILT = {"x86": ("baseline", "avx2x16", "avx2", "avx512", "avx512bf16"), "arm": ("baseline",)}

FACTS = """
import sys, levelhead as lh
print(lh.info())
assert lh.info().built == {built}, lh.info().built
if {free}:
    assert not sys._is_gil_enabled(), "importing levelhead brought the GIL back"
"""


def main() -> None:
    if sys.argv[1:] == ["--needs"]:
        print(*NEEDS)
        return
    root = Path(__file__).resolve().parents[1]
    machine = "arm" if platform.machine() in ("aarch64", "arm64") else "x86"
    facts = FACTS.format(built=BUILT[machine], free=bool(sysconfig.get_config_var("Py_GIL_DISABLED")))
    tests = [str(root / "tests" / x) for x in TESTS]
    settings = ["--rootdir", str(root), "-c", str(root / "pyproject.toml"), "-p", "no:cacheprovider"]
    options = ["-q", "-k", "not torch", *settings, *sys.argv[1:]]
    # Not in the checkout: the package under test is the installed one.
    with tempfile.TemporaryDirectory() as elsewhere:
        for command in (["-c", facts], ["-m", "levelhead", "tour"], ["-m", "pytest", *options, *tests]):
            if subprocess.run([sys.executable, *command], cwd=elsewhere, env={**os.environ, "CI": ""}).returncode:
                raise SystemExit(f"levelhead: failed: python {' '.join(command[:3])}")


if __name__ == "__main__":
    main()
