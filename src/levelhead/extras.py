"""Optional packages: the commands that install them, and the one error where they are missing.

The extras are those of pyproject.toml. Packages are looked up; only `need` imports one.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from levelhead.errors import LevelheadImportError, expected

JAX_PYTHON = (3, 11)  # what the oldest jax needs whose interface levelhead.jax is built against


class MissingPackageError(LevelheadImportError):
    """A package that a part of levelhead needs is not installed."""


def command(*extras: str) -> str:
    """Installs these extras. In double quotes: every shell reads them, and cmd.exe reads no others.

    >>> command("page", "models")
    'pip install "levelhead[page,models]"'
    """
    return f'pip install "levelhead[{",".join(extras)}]"'


def installed(package: str) -> bool:
    """Whether it can be found, without importing it. A folder of that name where Python looks for modules, without code
    of its own, is no package."""
    try:
        spec = find_spec(package)
        return spec is not None and spec.origin is not None
    except (ImportError, ValueError):  # a finder refuses it, or a module by that name was put in by hand
        return False


def absent(packages: Sequence[str]) -> list[str]:
    """Those of the packages that are not installed."""
    return [package for package in packages if not installed(package)]


def missing(what: str, *packages: str, install: str) -> MissingPackageError | None:
    """The error to raise unless all of these packages are installed; `install` is the command that installs them."""
    gone = absent(packages)
    return _error(what, _listed(packages), f"no {', '.join(gone)}", install) if gone else None


def require(what: str, *packages: str, install: str) -> None:
    """Raises that error if there is one."""
    if error := missing(what, *packages, install=install):
        raise error


def need(what: str, *modules: str, install: str) -> Any:
    """The first of these modules that is installed; else an error with the command that installs it."""
    for module in modules:
        try:
            return importlib.import_module(module)
        except ImportError as error:
            why = error
    packages = " or ".join(module.partition(".")[0] for module in modules)
    raise _error(what, packages, f"none ({why})", install) from why


def _listed(packages: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(packages[:-1]), packages[-1])))


def _error(what: str, packages: str, given: str, install: str) -> MissingPackageError:
    plural = "s" * (" and " in packages)
    return MissingPackageError(expected(what, f"the package{plural} {packages}", given, f"Run: {install}"))
