"""What is to be done at the end of a step: each part is, whatever the others raise.

A step that was measured has ended also where a sink, or a function that receives findings, raises. A caller that
catches the error goes on with the next step, and the other sinks still get every snapshot.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any


class Attempts:
    """In a `with`: calls functions, and at its end raises the first error; a warning names the others."""

    def __init__(self) -> None:
        self._errors: list[Exception] = []

    def __call__(self, do: Callable[..., object], *given: Any) -> None:
        try:
            do(*given)
        except Exception as error:
            self._errors.append(error)

    def __enter__(self) -> Attempts:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None or not self._errors:
            return
        first, *others = dict.fromkeys(f"{type(each).__name__}: {' '.join(str(each).split())}" for each in self._errors)
        del self._errors[1:]
        try:
            for other in others:
                warnings.warn(f"levelhead: beside the error that is raised ({first}) there was {other}", stacklevel=2)
        finally:  # also where warnings are errors
            raise self._errors.pop()  # an error holds the frames that hold this
