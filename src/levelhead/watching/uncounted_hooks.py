"""Hooks that torch does not count: `nn.TransformerEncoderLayer` takes its native fast path only if no module in it has
hooks. While it runs, those of a watch count as none; they run as ever.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, TypeAlias

from torch import nn

Before: TypeAlias = list[tuple[nn.Module, str, Any]]


class _Hooks(OrderedDict[int, Any]):
    """Hooks of a module, of which `len` counts those of others: a watch's have negative numbers."""

    def __len__(self) -> int:
        return sum(number >= 0 for number in self)

    def __bool__(self) -> bool:
        return any(True for _ in self)


def uncounted(modules: Iterable[nn.Module]) -> Before:
    """Replaces the hooks of modules by equal ones that are not counted; what was there, for `counted`."""
    names = ("_forward_hooks", "_forward_pre_hooks")
    before = [(module, name, vars(module)[name]) for module in modules for name in names]
    for module, name, hooks in before:
        vars(module)[name] = _Hooks(hooks)
    return before


def counted(before: Before) -> None:
    """Undoes `uncounted`."""
    for module, name, hooks in before:
        vars(module)[name] = hooks
