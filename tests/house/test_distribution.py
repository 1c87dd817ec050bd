"""The source distribution builds offline from its own contents, and an uninstalled wheel leaves nothing behind."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

import levelhead as lh

# Whoever asks for the network in spite of this gets a port that nobody listens to.
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""} | dict.fromkeys(("http_proxy", "https_proxy"), "127.0.0.1:9")

# A compiler that does not optimise reads the same files, for the same targets, in a third of the time.
UNOPTIMISED = {"cmake.build-type": "Debug", "cmake.define.CMAKE_CXX_FLAGS_DEBUG": "-O0"}

SDIST = "from scikit_build_core.build import build_sdist; import sys; build_sdist(sys.argv[1])"


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LEVELHEAD", "PYTHON", "PIP"))}
    words = [*map(str, command)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, cwd=cwd, env=kept | environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built of nothing but the unpacked source distribution."""
    place = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-c", SDIST, place, cwd=root, **OFFLINE)
    (archive,) = place.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(place, filter="data")
    switches = [f"--config-settings={name}={value}" for name, value in UNOPTIMISED.items()]
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", place]
    run(*command, *switches, place / archive.name.removesuffix(".tar.gz"), cwd=place, **OFFLINE)
    (built,) = place.glob("*.whl")
    return built


def test_a_build_without_a_compiler_names_the_one_that_needs_none(root: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", tmp_path]
    with pytest.raises(AssertionError, match="set LEVELHEAD_PURE=1 in the environment"):
        run(*command, f"--config-settings=build-dir={tmp_path}", root, cwd=tmp_path, CXX="/nowhere/g++", **OFFLINE)


def test_the_sdist_builds_offline_what_is_installed(wheel: Path) -> None:
    """File for file; the libraries, which are built here without optimisation, by name."""
    ours = {path.as_posix(): path for path in importlib.metadata.files("levelhead")}
    ours = {name: path for name, path in ours.items() if name.startswith("levelhead/") and "__pycache__" not in name}
    with zipfile.ZipFile(wheel) as built:
        names = {name for name in built.namelist() if name.startswith("levelhead/") and not name.endswith("/")}
        assert names == ours.keys() and len(names) > 500
        different = [name for name in names if built.read(name) != ours[name].locate().read_bytes()]
    assert [name for name in different if not name.endswith((".so", ".pyd", ".dylib"))] == []


def test_the_wheel_holds_no_source_of_the_core(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as built:
        names = built.namelist()
    source = re.compile(r"\.(cpp|h|hpp|cmake|o|a)$|CMakeLists|^(core|tests|bench)/")
    assert [name for name in names if source.search(name)] == []


def test_uninstalled_it_leaves_nothing(wheel: Path, tmp_path: Path) -> None:
    environment, home, beside = (tmp_path / name for name in ("environment", "home", "beside"))
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    home.mkdir()
    beside.mkdir()  # NumPy alone, from here
    packages = Path(np.__file__).parents[1]
    for name in ("numpy", "numpy.libs"):
        if (packages / name).exists():
            (beside / name).symlink_to(packages / name)
    before = sorted(environment.rglob("*"))
    pip = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python"]
    run(*pip, "install", "--no-deps", wheel, cwd=home, **OFFLINE)
    program, used = environment / "bin" / "levelhead", {"PYTHONPATH": str(beside), "HOME": str(home)}
    assert f"levelhead {lh.__version__}" in run(program, "info", cwd=home, **used)
    assert [*home.iterdir()] == []
    run(program, "lab", "run", "C4", cwd=home, **used)
    assert "lab" in run(program, "cache", cwd=home, **used) and [*home.iterdir()] == [home / ".cache"]
    run(program, "cache", "--clear", cwd=home, **used)
    run(*pip, "uninstall", "--yes", "levelhead", cwd=home, **OFFLINE)
    assert sorted(environment.rglob("*")) == before
    assert [*home.rglob("*")] == [home / ".cache"]
