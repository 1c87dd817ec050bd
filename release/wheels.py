"""Builds the source distribution and the wheels for Linux into dist/, for x86_64 and aarch64: `make wheels`.

All wheels are built from the source distribution, so it is complete, with the compiler of release/zig.cmake. What
differs between two machines (paths, times, the order of files) does not reach them: the same commit gives the same
bytes, which --twice verifies. release/judge.py says what else must be true. Nothing is published here.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path

import ziglang

from judge import faults

ROOT = Path(__file__).resolve().parents[1]
MACHINES = ("x86_64", "aarch64")
GLIBC = (2, 17)  # the oldest that manylinux names beside 2.5 and 2.12, and that zig has for both machines

# The interpreters that wheels are built for. 3.12 builds the one for the stable ABI, which all later ones take; those
# without the GIL have no stable ABI until 3.15.
ABIS = {"cp310": "3.10", "cp311": "3.11", "cp312-abi3": "3.12", "cp313t": "3.13t", "cp314t": "3.14t"}
NO_JAX = ("cp310",)  # the releases of jax whose interface levelhead.jax is built against have left it behind

BUILD = "import json, sys; from scikit_build_core.build import build_{what} as build; build(*json.loads(sys.argv[1]))"


@dataclass(frozen=True)
class Place:
    """The folders of one build."""

    work: Path
    out: Path
    cache: Path  # the compiler's; outlives a build

    @property
    def tools(self) -> Path:
        return self.work / "tools"


def run(command: list[str | Path], **options: object) -> str:
    """The output of a command; what it printed is shown only if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)  # type: ignore[call-overload]
    if done.returncode:
        raise SystemExit(f"{done.stdout}\nlevelhead: failed: {' '.join(map(str, command))}")
    return str(done.stdout)


# ---- interpreters -----------------------------------------------------------


def version_of(python: Path) -> str | None:
    """`3.13t` for a CPython without the GIL. None: it cannot build a wheel (no headers, a debug build, no CPython)."""
    code = """
import sys, sysconfig, os
free = "t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
usable = (sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_DEBUG")
          and os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))
print("%d.%d%s" % (sys.version_info[0], sys.version_info[1], free) if usable else "")
"""
    try:
        done = subprocess.run([python, "-Ic", code], capture_output=True, text=True, timeout=60)
    except OSError:
        return None
    return done.stdout.strip() or None


def interpreters(named: list[Path]) -> dict[str, Path]:
    """One Python per entry of ABIS, where there is one: those named first, then PATH, then pyenv's."""
    wanted = ABIS.values()
    candidates = [*named, Path(sys.executable)]
    candidates += [Path(x) for version in sorted(wanted) if (x := shutil.which(f"python{version}"))]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates += sorted(pyenv.glob("versions/3.*/bin/python3"))
    found: dict[str, Path] = {}
    for python in candidates:
        version = version_of(python)
        if python in named and version not in wanted:
            raise SystemExit(f"levelhead: no wheel is built with {python} ({version}); wanted: {', '.join(wanted)}")
        if version in wanted:
            found.setdefault(version, python)
    return {abi: found[version] for abi, version in ABIS.items() if version in found}


# ---- building ---------------------------------------------------------------


def epoch() -> str:
    """The time of every file in the wheels: of the last commit."""
    return os.environ.get("SOURCE_DATE_EPOCH") or run(["git", "-C", ROOT, "log", "-1", "--format=%ct"]).strip()


def build_tools(place: Place) -> None:
    """The build backend, for every interpreter at once. The last two packages are for Python 3.10 alone."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--constraint", ROOT / "constraints.txt"]
    oldest = ["--target", place.tools, "--python-version", ABIS["cp310"], "--only-binary", ":all:"]
    run([*pip, *oldest, "scikit-build-core", "nanobind", "exceptiongroup", "tomli"])


def source(place: Place, environment: dict[str, str]) -> Path:
    """Makes the source distribution and unpacks it."""
    run([sys.executable, "-c", BUILD.format(what="sdist"), json.dumps([str(place.out)])], cwd=ROOT, env=environment)
    (archive,) = place.out.glob("*.tar.gz")
    with tarfile.open(archive) as members:
        members.extractall(place.work / "source", filter="data")
    (folder,) = (place.work / "source").iterdir()
    return folder


def build(place: Place, folder: Path, abi: str, python: Path, machine: str, environment: dict[str, str]) -> Path:
    """One wheel. auditwheel gives it the tag that its libraries allow."""
    # In one folder per machine the core is compiled once; what CMake found out about another interpreter is forgotten.
    (place.work / machine / "CMakeCache.txt").unlink(missing_ok=True)
    settings = {
        "build-dir": str(place.work / machine),
        "cmake.define.CMAKE_TOOLCHAIN_FILE": str(folder / "release/zig.cmake"),
    }
    version = ABIS[abi].replace(".", "")
    environment = environment | {
        "LEVELHEAD_TARGET": f"{machine}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}",
        # scikit-build-core reads both: the wheel's platform, and the suffix of an extension that is not abi3.
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
        "SETUPTOOLS_EXT_SUFFIX": f".cpython-{version}-{machine}-linux-gnu.so",
        "LEVELHEAD_XLA_HEADERS": "" if abi in NO_JAX else str(headers_of_jax()),
    }
    plain, before = place.work / f"{abi}-{machine}-wheel", set(place.out.iterdir())
    run([python, "-c", BUILD.format(what="wheel"), json.dumps([str(plain), settings])], cwd=folder, env=environment)
    run([sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", place.out, *plain.iterdir()], env=environment)
    (wheel,) = set(place.out.iterdir()) - before
    if not wheel.name.endswith(f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}.whl"):
        raise SystemExit(f"levelhead: auditwheel allows no older glibc than that of {wheel.name}")
    return wheel


def headers_of_jax() -> Path:
    import jax  # not there for Python 3.10

    return Path(jax.ffi.include_dir())


def everything(place: Place, pythons: dict[str, Path]) -> dict[str, float]:
    """Builds all files into place.out, and returns the seconds that each took."""
    shutil.rmtree(place.work, ignore_errors=True)
    place.work.mkdir(parents=True)
    place.out.mkdir(parents=True, exist_ok=True)
    for old in [*place.out.glob("levelhead-*.tar.gz"), *place.out.glob("levelhead-*-manylinux*.whl")]:
        old.unlink()
    steers = re.compile("CXX|CFLAGS|CPPFLAGS|LDFLAGS|CMAKE_|SKBUILD_|LEVELHEAD_|PYTHON")
    plain = {name: value for name, value in os.environ.items() if not steers.match(name)}
    environment = plain | {
        "SOURCE_DATE_EPOCH": epoch(),
        "PYTHONPATH": str(place.tools),
        "PYTHONDONTWRITEBYTECODE": "1",
        "LEVELHEAD_ZIG": str(Path(ziglang.__file__).with_name("zig")),
        # The compiler's own libraries, libc++ among them, are compiled once per machine and kept.
        "ZIG_GLOBAL_CACHE_DIR": str(place.cache),
        "ZIG_LOCAL_CACHE_DIR": str(place.cache),
    }
    build_tools(place)
    folder = source(place, environment)
    seconds = {}
    for machine in MACHINES:
        for abi, python in pythons.items():
            started = time.monotonic()
            wheel = build(place, folder, abi, python, machine, environment)
            seconds[wheel.name] = time.monotonic() - started
            if wrong := faults(wheel, jax=abi not in NO_JAX):
                raise SystemExit("levelhead: " + "\n".join(wrong))
            print(f"levelhead: {wheel.name} ({seconds[wheel.name]:.0f} s) …", flush=True)
    return seconds


def digests(folder: Path) -> dict[str, str]:
    files = [*folder.glob("levelhead-*.tar.gz"), *folder.glob("levelhead-*-manylinux*.whl")]
    return {x.name: hashlib.sha256(x.read_bytes()).hexdigest() for x in sorted(files)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--twice", action="store_true", help="build again in other folders, and compare the bytes")
    parser.add_argument("pythons", nargs="*", type=Path, metavar="PYTHON", help="interpreters that are not on PATH")
    given = parser.parse_args()
    if sys.version_info < (3, 11):
        raise SystemExit("levelhead: the headers of jax need Python 3.11: make wheels PYTHON=python3.12 VENV=.venv312")
    started = time.monotonic()
    pythons = interpreters(given.pythons)
    first = Place(ROOT / "build/wheels", ROOT / "dist", ROOT / "build/zig")
    seconds = everything(first, pythons)
    made = digests(first.out)
    if given.twice:
        other = ROOT / "build/wheels-once-more"
        shutil.rmtree(other, ignore_errors=True)
        second = Place(other / "in/other/folders", other / "dist", other / "zig")
        everything(second, pythons)
        differ = [name for name, digest in digests(second.out).items() if made[name] != digest]
        if differ:
            raise SystemExit(f"levelhead: built twice, {', '.join(differ)} differ")
        print(f"levelhead: built twice in different folders: the same bytes, {len(made)} files of {len(made)}")
    for name, digest in made.items():
        size = (first.out / name).stat().st_size / 1e6
        print(f"{name:78} {size:5.2f} MB {seconds.get(name, 0):4.0f} s  sha256 {digest}")
    for abi, version in ABIS.items():
        if abi not in pythons:
            print(
                f"not built: {abi}, for want of CPython {version} and its headers (make wheels PYTHONS=/path/to/python)"
            )
    print(f"levelhead: {len(made)} files in {first.out.relative_to(ROOT)}/, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
