"""Attention functions of libraries that the table does not have, by the names that a module's code uses.

Nothing is said about what they compute: a module that ran, used such a name and was not observed is reported with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from levelhead.torch.held import is_of_library, names_in
from levelhead.watching.functions.taught import name_of

_ATTENDS = ("attn", "attention")
# Words in the names of helpers: what they return is no attention.
_HELPER_WORDS = "mask bias pad config is_ has_ get_ set_ make prepare register support available weight init name type"
_HELPERS = _HELPER_WORDS.split()


def called_by(module: nn.Module) -> list[str]:
    """The qualified names of such functions, those that it holds too; operators of torch.ops by their last name."""
    found: dict[str, None] = {}
    for value in vars(module).values():
        if _is_foreign(value, type(module).__module__):
            found[name_of(value)] = None
    for function in _functions(type(module)):
        names = names_in(function)
        values = [function.__globals__.get(name) for name in names]
        values += [vars(x).get(name) for x in values if isinstance(x, ModuleType) for name in names]
        for value in values:
            if _is_foreign(value, function.__module__ or ""):
                found[name_of(value)] = None
        if {"torch", "ops"} <= names and "aten" not in names:
            found |= {f"torch.ops ... {name}": None for name in sorted(names) if _sounds(name)}
    return list(found)


def _functions(kind: type) -> Iterator[FunctionType]:
    for base in kind.__mro__:
        if not is_of_library(base.__module__):
            for value in vars(base).values():
                inner = getattr(value, "__func__", value)
                if isinstance(inner, FunctionType):
                    yield inner


def _is_foreign(value: Any, user: str) -> bool:
    """Whether it is an attention function of a library that is neither known nor the user's own."""
    if not callable(value) or isinstance(value, type | nn.Module) or not _sounds(getattr(value, "__name__", "")):
        return False
    module = getattr(value, "__module__", None) or ""
    return not is_of_library(module) and module.partition(".")[0] != user.partition(".")[0]


def _sounds(name: str) -> bool:
    lower = name.lower()
    return any(word in lower for word in _ATTENDS) and not any(word in lower for word in _HELPERS)
