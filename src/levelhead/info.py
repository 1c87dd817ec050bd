"""What this installation is and what it chose: version, ISA, threads, front ends, and why; and the machine it is on.

It reports and decides nothing. Packages are looked up, never imported.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from typing import Any

import numpy as np

from levelhead import _core
from levelhead._version import __version__
from levelhead.device.choice import choice, ignored
from levelhead.errors import LevelheadError
from levelhead.extras import JAX_PYTHON, command, installed
from levelhead.words import in_bytes

# package -> what levelhead does with it
_FRONT_ENDS = {
    "torch": "tensors in, tensors out",
    "onnx": "levelhead.onnx.Attention",
    "jax": "levelhead.jax, and arrays through DLPack",
    "ml_dtypes": "bfloat16 in NumPy",
    "triton": "statistics of watched calls in one pass on CUDA and ROCm",
}

_INSTALLS = {"ml_dtypes": "pip install ml_dtypes"}  # the others are extras of the same name
if sys.version_info < JAX_PYTHON:
    _INSTALLS["jax"] = "it needs Python {}.{} or later".format(*JAX_PYTHON)


_NUMPY = "numpy"  # what the pure wheel's core says that it runs on


@dataclass(frozen=True, repr=False)
class Info(Mapping[str, Any]):
    """A read-only mapping with attributes; prints as a short report."""

    version: str
    isa: str  # the instruction set the kernels run on now
    available: tuple[str, ...]  # what this CPU could run
    built: tuple[str, ...]  # what this build contains
    threads: int  # used for threads=None, torch tensors aside
    numpy: str  # its version
    front_ends: Mapping[str, str | None]  # package -> version, None: not installed
    watched: Mapping[str, str]  # device -> what measures a watched call there, and why
    # The directory of what levelhead keeps between runs, and its bytes: `levelhead cache`. None: there can be no such
    # directory, or it cannot be read, and `off` says why.
    cache: Mapping[str, Any]
    off: tuple[str, ...]  # what is not in use, and why

    def __getitem__(self, key: str) -> Any:
        if key not in set(self):
            raise KeyError(key)
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self))

    def __len__(self) -> int:
        return len(fields(self))

    def __repr__(self) -> str:
        installed = [f"{name} {version}" for name, version in self.front_ends.items() if version]
        lines = [
            f"levelhead {self.version}",
            f"  isa         {self.isa}  (this CPU can run: {', '.join(self.available)})",
            f"  threads     {self.threads}",
            f"  front ends  {', '.join([f'numpy {self.numpy}', *installed])}",
            f"  watching    {'; '.join(f'{device}: {words}' for device, words in self.watched.items())}",
        ]
        if self.cache["bytes"] is not None:
            lines.append(f"  cache       {self.cache['directory']}: {in_bytes(self.cache['bytes'])}")
        return "\n".join(lines + [f"  off         {reason}" for reason in self.off])


def info() -> Info:
    """What runs here, and why something does not.

    >>> info().isa in info().available
    True
    """
    core = _core.info()
    front_ends = {name: installed_version(name) for name in _FRONT_ENDS}
    kept, no_cache = _kept()
    return Info(
        version=__version__,
        isa=core["isa"],
        available=tuple(core["available"]),
        built=tuple(core["built"]),
        threads=core["threads"],
        numpy=np.__version__,
        front_ends=front_ends,
        watched={device: "{} ({})".format(*choice(device)) for device in ("cpu", "cuda", "mps", "xpu")},
        cache=kept,
        off=(*_reasons(core["isa"], core["available"], core["built"], front_ends), *no_cache),
    )


def _kept() -> tuple[dict[str, Any], list[str]]:
    """What `Info.cache` is, and why there is none."""
    from levelhead import cache  # brings shutil and tempfile: a fifth of the time that importing levelhead takes

    kept: dict[str, Any] = {"directory": None, "bytes": None}
    try:
        kept["directory"] = str(cache.directory())
        kept["bytes"] = sum(cache.sizes().values())
    except LevelheadError as error:
        return kept, [str(error)]
    return kept, []


def is_pure() -> bool:
    """Whether NumPy is the core, as in the pure wheel; .pyc: in a program that was frozen."""
    # No call of the core, which may refuse a variable of the environment.
    return str(_core.__file__).endswith((".py", ".pyc"))


def cpu_name() -> str:
    """The CPU's model, where the system gives one."""
    try:
        with open("/proc/cpuinfo") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or "unknown"


def measured_here() -> dict[str, Any]:
    """Where and when a measurement is made: the beginning of every file of measurements."""
    machine = dict(cpu=cpu_name(), cpus=os.cpu_count(), system=platform.system(), machine=platform.machine())
    return dict(
        levelhead=__version__,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        machine=machine | {"isa": _core.info()["isa"]},
        versions={"python": platform.python_version(), "numpy": np.__version__},
    )


def installed_version(package: str) -> str | None:
    """Of a package, without importing it; None: it is not installed."""
    from importlib import metadata  # slow to import, and rarely needed

    if not installed(package):
        return None
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(version unknown)"


def _reasons(isa: str, available: list[str], built: list[str], front_ends: Mapping[str, str | None]) -> Iterator[str]:
    if isa == _NUMPY:
        yield (
            "compiled kernel: this is the pure wheel, in which NumPy computes, slower; pip takes a compiled wheel "
            "where one fits, and pip install . builds one from a clone with a C++20 compiler"
        )
    for name in built:
        if name not in available:
            yield f"{name}: built, but this CPU does not have it"
    override = os.environ.get("LEVELHEAD_ISA")
    if override:
        yield f"automatic choice of isa: LEVELHEAD_ISA={override} is set"
    elif available and isa != available[-1]:
        yield f"{available[-1]}: available, but {isa} was chosen by hand"
    limit = os.environ.get("LEVELHEAD_NUM_THREADS")
    if limit and limit.isascii() and limit.isdecimal() and float(limit) > 0:  # int() refuses 4301 digits
        yield f"automatic choice of threads: LEVELHEAD_NUM_THREADS={limit} is set"
    elif limit:
        yield f"LEVELHEAD_NUM_THREADS={limit}: ignored, it is not a positive integer"
    if in_vain := ignored():
        yield in_vain
    if front_ends["jax"] and isa == _NUMPY:
        yield "custom calls of levelhead.jax: JAX's own operations compute, since there is no kernel; no dropout there"
    elif front_ends["jax"] and not installed("levelhead._jax_ffi"):
        yield (
            "levelhead.jax: this build did not find jaxlib; with jax installed, "
            "pip install --no-build-isolation --force-reinstall --no-deps levelhead"
        )
    for name, version in front_ends.items():
        if version is None:
            yield f"{name} ({_FRONT_ENDS[name]}): not installed; {_INSTALLS.get(name) or command(name)}"
