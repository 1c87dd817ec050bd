"""`Scores`: a product of queries and keys that was not computed, and what has been done with it since.

It is a tensor without numbers. Whoever reads it gets them, by the operations that were recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from levelhead.errors import bad_value

_METADATA = {"shape", "dtype", "device", "ndim", "layout", "is_nested", "is_cuda", "requires_grad", "is_sparse"}
_MEASURES = {"size", "dim", "numel", "ndimension", "is_floating_point", "nelement", "__len__", "is_complex"}


@dataclass(frozen=True)
class Formula:
    """q · kᵀ · factor + bias; then its softmax, once `p` is set."""

    q: Tensor  # (..., T, D)
    k: Tensor  # (..., S, D)
    factor: float = 1.0
    bias: Tensor | None = None
    p: float | None = None  # the dropout of the weights; None: these are logits

    @property
    def learns(self) -> bool:
        tensors = (self.q, self.k, self.bias)
        return any(x.requires_grad for x in tensors if x is not None)

    @property
    def shape(self) -> torch.Size:
        lead = torch.broadcast_shapes(self.q.shape[:-2], self.k.shape[:-2])  # type: ignore[no-untyped-call]
        return torch.Size((*lead, self.q.shape[-2], self.k.shape[-2]))


class Scores(Tensor):
    """A product of activations that was not computed, and what has been done with it since."""

    formula: Formula
    steps: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...]  # the same as the module wrote it; `HERE` is itself
    numbers: Tensor | None  # once they are computed
    recorded: bool  # whether gradients were recorded where the product stands

    @staticmethod
    def __new__(cls, formula: Formula, steps: Any, dtype: torch.dtype) -> Scores:
        made: Scores = torch.Tensor._make_wrapper_subclass(cls, formula.shape, dtype=dtype, device=formula.q.device)
        made.formula, made.steps, made.numbers = formula, steps, None
        made.recorded = torch.is_grad_enabled()
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Outside the module's forward: the numbers are wanted."""
        return asked(func, args, kwargs or {}) if is_metadata(func) else func(*real(args), **real(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Below Python's functions, where gradients are no longer recorded."""
        found = real((args, kwargs or {}))
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(found)):
            given = f"a call of {func} that bypasses __torch_function__"
            raise bad_value("weights", "a function of torch's Python interface", given, "Compute on weights.clone()")
        return func(*found[0], **found[1])

    def computed(self) -> Tensor:
        """The numbers, by the module's own operations."""
        if self.numbers is None:
            value: Any = None
            with torch.set_grad_enabled(self.recorded):
                for func, args, kwargs in self.steps:
                    args, kwargs = tree_map(lambda x, now=value: now if x is HERE else x, (args, kwargs))
                    value = func(*real(args), **real(kwargs))
            self.numbers = value
        return self.numbers


HERE = object()


def real(x: Any) -> Any:
    return tree_map(lambda y: y.computed() if isinstance(y, Scores) else y, x)


def is_metadata(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") in _METADATA
    return name in _MEASURES


def unread(formed: Callable[[], Tensor], q: Tensor, k: Tensor) -> Scores:
    """Weights that `formed` computes when somebody reads them; q has as many heads or more than k."""
    return Scores(Formula(q, k[..., :1, :, :], p=0.0), ((formed, (), {}),), q.dtype)


def finished(out: Any, *, weights: bool) -> Any:
    """A module's output. Logits are computed now; weights now if they are asked for, else when somebody reads them."""

    def finish(x: Any) -> Any:
        return x.computed() if isinstance(x, Scores) and (weights or x.formula.p is None) else x

    return tree_map(finish, out)


def asked(func: Any, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def fits(x: Tensor, shape: torch.Size) -> bool:
    """Whether it broadcasts to the shape, and does not widen it."""
    pairs = zip(reversed(x.shape), reversed(shape), strict=False)
    return x.dim() <= len(shape) and all(n in (1, full) for n, full in pairs)
