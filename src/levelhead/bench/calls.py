"""What problems, peers and cells hand each other: questions, calls to be timed, refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from numpy.typing import NDArray

from levelhead.bench.cases import Case

Array: TypeAlias = NDArray[Any]
Parts: TypeAlias = dict[str, Array]  # the arrays of an answer by name: the output, gradients


class Question(Protocol):
    """A case with numbers in it, and what a cell must know about it."""

    @property
    def case(self) -> Case: ...

    def truth(self) -> Parts:
        """The answer in float64, or the sample of it that is compared."""

    def sampled(self, result: Any) -> Parts:
        """Of what a call's `read` gave: the numbers to lay beside the truth."""

    def flops(self) -> int | None:
        """The work there is to do; None where it is not made of multiplications and additions."""

    def traffic(self) -> int | None:
        """Bytes that must cross memory once; None where nobody counted."""

    @property
    def output_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Call:
    run: Callable[[], Any]  # what is timed
    read: Callable[[Any], Any]  # its result in NumPy's arrays, outside the timing
    warm: bool = False  # run compiles: memory must be measured at a second call


Variants: TypeAlias = dict[str, Callable[[], Call]]  # built only when wanted


class Refused(Exception):  # noqa: N818 - an answer, not an accident
    """A peer cannot compute a case; the message says why."""


_SCORES = 4 * 2**30  # bytes of scores beyond which a machine with little memory would swap


def refuse_large_scores(case: Case) -> None:
    """For implementations that store the matrix of scores."""
    needed = 4 * case.B * case.H * case.T * case.S * (case.additive or 1)
    if needed > _SCORES:
        raise Refused(f"stores all scores, {needed / 2**30:.0f} GiB here")
