"""The types that problems, peers and cells share: questions, calls to be timed, refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from numpy.typing import NDArray

from levelhead.bench.cases import Case

Array: TypeAlias = NDArray[Any]
Parts: TypeAlias = dict[str, Array]  # the arrays of an answer by name: the output, gradients


class Question(Protocol):
    """A case with numbers in it, its true answer, and the work it takes."""

    @property
    def case(self) -> Case: ...

    def truth(self) -> Parts:
        """The answer in float64, or the sample of it that is compared."""

    def sampled(self, result: Any) -> Parts:
        """The part of a call's result that is compared with the truth."""

    def flops(self) -> int | None:
        """The work there is to do; None where it is not made of multiplications and additions."""

    def traffic(self) -> int | None:
        """Bytes that must cross memory once; None where they are not counted."""

    @property
    def output_bytes(self) -> int: ...


class Differentiable(Question, Protocol):
    """A question about a function of arrays; training also takes the gradients by all of them."""

    @property
    def arguments(self) -> Parts: ...

    @property
    def dout(self) -> Array: ...


def named(question: Differentiable, arrays: Iterable[Array]) -> Parts:
    """The output and the gradients by all arguments, by name."""
    return dict(zip(("out", *(f"d{name}" for name in question.arguments)), arrays, strict=True))


class Uncounted:
    """A question whose answer is compared whole, and whose work is not counted."""

    def sampled(self, result: Array | Parts) -> Parts:
        return result if isinstance(result, dict) else {"out": result}

    def flops(self) -> None:
        return None

    def traffic(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Call:
    run: Callable[[], Any]  # what is timed
    read: Callable[[Any], Any]  # its result in NumPy's arrays, outside the timing
    warm: bool = False  # run compiles: memory must be measured at a second call


Variants: TypeAlias = dict[str, Callable[[], Call]]  # built only when wanted


class Refused(Exception):  # noqa: N818 - an expected result, not an error
    """A peer cannot compute a case; the message says why."""


_SCORES = 4 * 2**30  # bytes of scores beyond which a machine with little memory would swap


def refuse_large_scores(case: Case) -> None:
    """For implementations that store the matrix of scores."""
    needed = 4 * case.B * case.H * case.T * case.S * (case.additive or 1)
    if needed > _SCORES:
        raise Refused(f"stores all scores, {needed / 2**30:.0f} GiB here")
