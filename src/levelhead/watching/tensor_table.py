"""What is known of tensors that are still alive. Following asks this several times for every operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import KeyedRef, ref

from torch import Tensor

T = TypeVar("T")


class TensorTable(Generic[T]):
    """By the tensor itself, not by its numbers; a tensor that is gone leaves no entry."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[KeyedRef[int, Tensor], T]] = {}
        self._remove = _remover(self)

    def get(self, x: Tensor) -> T | None:
        entry = self._entries.get(id(x))
        return None if entry is None or entry[0]() is not x else entry[1]

    def __setitem__(self, x: Tensor, known: T) -> None:
        self._entries[id(x)] = KeyedRef(x, self._remove, id(x)), known

    def __contains__(self, x: Tensor) -> bool:
        return self.get(x) is not None

    def drop(self, x: Tensor) -> None:
        """Forgets what is known of x."""
        self._entries.pop(id(x), None)

    def forget(self, gone: KeyedRef[int, Tensor]) -> None:
        entry = self._entries.get(gone.key)
        if entry is not None and entry[0] is gone:  # else another tensor is in its place by now
            del self._entries[gone.key]


def _remover(table: TensorTable[T]) -> Callable[[KeyedRef[int, Tensor]], None]:
    """Does not keep the table alive: what it holds goes with the pass."""
    reference = ref(table)

    def remove(gone: KeyedRef[int, Tensor]) -> None:
        if (alive := reference()) is not None:
            alive.forget(gone)

    return remove
