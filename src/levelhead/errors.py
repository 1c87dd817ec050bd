"""The errors levelhead raises on purpose, and the one shape of their messages.

Every message names the argument, what was expected, what was given and what to do. The checks themselves are beside the
options they check.
"""

from __future__ import annotations

from typing import Any


class LevelheadError(Exception):
    """Base of every error that levelhead raises on purpose."""


class LevelheadValueError(LevelheadError, ValueError):
    """A value, shape or size that cannot be served."""


class LevelheadTypeError(LevelheadError, TypeError):
    """A type, dtype or array family that cannot be served."""


class FindingError(LevelheadError):
    """`on_finding="raise"`: a watch found something; `finding` is what."""

    def __init__(self, finding: Any) -> None:
        super().__init__(f"{finding} Try: {finding.advice}")
        self.finding = finding


def expected(argument: str, expected: str, given: object, advice: str) -> str:
    """The message "argument: expected ..., got .... Advice."."""
    return f"{argument}: expected {expected}, got {given}. {advice.rstrip('.')}."


def bad_value(argument: str, wanted: str, given: object, advice: str) -> LevelheadValueError:
    """The error to raise for a value, shape or size."""
    return LevelheadValueError(expected(argument, wanted, given, advice))


def bad_type(argument: str, wanted: str, given: object, advice: str) -> LevelheadTypeError:
    """The error to raise for a type, dtype or array family."""
    return LevelheadTypeError(expected(argument, wanted, given, advice))
