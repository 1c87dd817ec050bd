"""What is known about an attention function: where it lives, what its arguments mean, and what is not described.

An entry of the table is a `Known`. Its `describe` turns the arguments of a call, by name, into a `Call`; its `refuses`
names an argument whose effect no `Call` describes. Such a call is reported by name, never guessed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from levelhead.watching.measure import Call

Given: TypeAlias = Mapping[str, Any]  # the arguments of a call by name; those left out are missing
Qkv: TypeAlias = tuple[Any, Any, Any]
View: TypeAlias = Callable[[Tensor], Tensor]
Followed: TypeAlias = tuple[tuple[str, Tensor, View], ...]  # "dq", "dk", "dv"; the tensor passed; its gradient by head


def _nothing(given: Given) -> str | None:
    return None


@dataclass(frozen=True)
class Known:
    """An attention function of a library, or a module class whose `forward` is one."""

    places: tuple[str, ...]  # "package.module:name", wherever the library shows it
    meaning: str  # layout, alignment and options, in a line
    describe: Callable[[Given], Call]
    followed: Callable[[Given], Followed]  # q, k and v as passed, and what makes (B, H, T, D) of them
    refuses: Callable[[Given], str | None] = _nothing
    is_class: bool = False

    @property
    def path(self) -> str:
        """The name under which its calls are reported."""
        module, name = self.places[0].split(":")
        return f"{module.partition('.')[0]}.{name}"


def arguments(names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name. Plain enough for Dynamo to trace."""
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of its parameters, in order; () if they cannot be read."""
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


def unknown_options(given: Given, known: Collection[str]) -> str | None:
    """The options in use that are not among the known ones."""
    used = [name for name, x in given.items() if name not in known and _is_on(x)]
    return ", ".join(used) or None


def _is_on(x: Any) -> bool:
    return isinstance(x, Tensor) or not (x is None or x is False or (isinstance(x, int | float | str) and not x))
