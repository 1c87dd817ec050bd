"""What a peer hands over: a call ready to be timed, or a reason why there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from levelhead.bench.cases import Case
from levelhead.bench.inputs import Array


@dataclass(frozen=True, slots=True)
class Call:
    run: Callable[[], Any]  # what is timed
    read: Callable[[Any], Array]  # its result as (B, H, T, E), outside the timing
    warm: bool = False  # run compiles: memory must be measured at a second call


Variants: TypeAlias = dict[str, Callable[[], Call]]  # built only when wanted


class Refused(Exception):  # noqa: N818 - an answer, not an accident
    """A peer cannot compute a case; the message says why."""


_SCORES = 4 * 2**30  # bytes of scores beyond which a machine with little memory would swap


def refuse_large_scores(case: Case) -> None:
    """For implementations that store the matrix of scores."""
    needed = 4 * case.B * case.H * case.T * case.S
    if needed > _SCORES:
        raise Refused(f"stores all scores, {needed / 2**30:.0f} GiB here")
