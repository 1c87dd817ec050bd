"""The errors levelhead raises on purpose, and the one shape of their messages.

Every message names the argument, what was expected, what was given and what to do. The checks themselves are beside the
options they check.
"""

from __future__ import annotations

import sys
from typing import Any


class LevelheadError(Exception):
    """Base of every error that levelhead raises on purpose."""


class LevelheadValueError(LevelheadError, ValueError):
    """A value, shape or size that cannot be served."""


class LevelheadTypeError(LevelheadError, TypeError):
    """A type, dtype or array family that cannot be served."""


class LevelheadImportError(LevelheadError, ImportError):
    """A package, a version of it or a library that a part of levelhead stands on is not there, or cannot be loaded."""


class FindingError(LevelheadError):
    """`on_finding="raise"`: a watch found something; `finding` is what."""

    def __init__(self, finding: Any) -> None:
        super().__init__(f"{finding} Try: {finding.advice}")
        self.finding = finding


def expected(argument: str, expected: str, given: object, advice: str) -> str:
    """The message "argument: expected ..., got .... Advice."."""
    return f"{argument}: expected {expected}, got {given}. {advice.rstrip('.')}."


def no_core(error: ImportError) -> LevelheadImportError:
    """The error of a compiled wheel whose library is missing or cannot be loaded. NumPy does not take its place: who
    installed a kernel is not to compute without it unawares."""
    install = "pip install --force-reinstall --no-deps"
    advice = (
        "It was built for another Python or system, or is damaged. Install it again with this interpreter "
        f"({sys.executable} -m {install} levelhead), or from a clone the wheel that needs no library: "
        f"LEVELHEAD_PURE=1 {install} ."
    )
    return bad_import("levelhead", "the compiled library of its wheel", f"{error!r}", advice)


def bad_value(argument: str, wanted: str, given: object, advice: str) -> LevelheadValueError:
    """The error to raise for a value, shape or size."""
    return LevelheadValueError(expected(argument, wanted, given, advice))


def bad_import(argument: str, wanted: str, given: object, advice: str) -> LevelheadImportError:
    """The error to raise for a package that is not there."""
    return LevelheadImportError(expected(argument, wanted, given, advice))


def bad_type(argument: str, wanted: str, given: object, advice: str) -> LevelheadTypeError:
    """The error to raise for a type, dtype or array family."""
    return LevelheadTypeError(expected(argument, wanted, given, advice))
