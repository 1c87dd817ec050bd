"""`deep=True`: softmax attention written by hand, seen below the level of Python functions.

A dispatch mode follows products of two activations through scaling, bias, masks and changes of
shape to the softmax that takes them in; there the logits are read as they are, with the factors
met on the way. Products with a parameter are projections, and a softmax over one is a classifier:
neither counts. `torch.compile` switches itself off under such a mode, hence it is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from levelhead.health.measure import from_scores
from levelhead.health.places import ATTRIBUTE, current

aten = torch.ops.aten
HOW = "softmax by hand"


@dataclass(frozen=True)
class _Product:
    """Scores that are `factor` times left · right, and what was added or hidden since."""

    left: Tensor  # (N, T, D)
    right: Tensor  # (N, D, S)
    factor: float | None  # None: not one number


_KEEPING = {  # the first argument's scores, in another shape, with more added or hidden
    "view", "_unsafe_view", "reshape", "expand", "permute", "transpose", "unsqueeze", "squeeze",
    "clone", "_to_copy", "alias", "detach", "select", "t", "contiguous", "view_as", "slice",
    "add", "add_", "sub", "sub_", "masked_fill", "masked_fill_", "tanh", "tanh_", "clamp",
    "clamp_", "where", "maximum", "minimum", "nan_to_num", "copy_", "index_put_", "_unsafe_index",
}  # fmt: skip
_SCALING: dict[str, Callable[[float, float], float]] = {
    "mul": lambda factor, x: factor * x,
    "mul_": lambda factor, x: factor * x,
    "div": lambda factor, x: factor / x if x else math.nan,
    "div_": lambda factor, x: factor / x if x else math.nan,
}
_SOFTMAX = {"_softmax", "_safe_softmax", "softmax"}


class Deep(TorchDispatchMode):
    """Follows products of activations while the watched model runs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._scores: Any = WeakIdKeyDictionary()
        self._weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        place = current()
        if place is None or place.busy or not place.watch.wanted():
            return out
        name = func.overloadpacket.__name__
        if name in _SOFTMAX:
            self._softmax(place, args)
        elif isinstance(out, Tensor):
            found = self._follow(name, args, kwargs or {})
            if found is not None:
                self._scores[out] = found
        return out

    def _follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Product | None:
        if name in ("bmm", "mm"):
            return self._product(args[0], args[1], 1.0)
        if name == "baddbmm":
            return self._product(args[1], args[2], float(kwargs.get("alpha", 1)))
        known = [self._scores.get(x) for x in args[:3] if isinstance(x, Tensor)]
        before = next((x for x in known if x is not None), None)
        if before is None:
            return None
        if name in _SCALING:
            other = args[1] if isinstance(args[0], Tensor) and args[0] in self._scores else args[0]
            number = _number(other)
            if number is None or before.factor is None:
                return replace(before, factor=None)
            return replace(before, factor=_SCALING[name](before.factor, number))
        return before if name in _KEEPING else None

    def _product(self, a: Tensor, b: Tensor, factor: float) -> _Product | None:
        if any(x.untyped_storage().data_ptr() in self._weights for x in (a, b)):
            return None
        a, b = (x.detach() if x.dim() == 3 else x.detach()[None] for x in (a, b))
        return _Product(a, b, factor)

    def _softmax(self, place: Any, args: tuple[Any, ...]) -> None:
        scores = args[0]
        found = self._scores.get(scores)
        if found is None or scores.dim() < 2 or args[1] not in (-1, scores.dim() - 1):
            return
        T, S = scores.shape[-2:]
        q, k = found.left, found.right.transpose(-1, -2)
        if (q.shape[1], k.shape[1]) != (T, S):
            return
        heads = scores.shape[-3] if scores.dim() > 3 else place.heads or 1
        if scores.numel() % (heads * T * S) or q.shape[0] % heads:
            heads = 1
        place.busy = True  # what is measured now is not to be followed
        try:
            logits = scores.detach().reshape(-1, heads, T, S)
            q, k = (x.reshape(-1, heads, *x.shape[1:]) for x in (q, k))
            place.watch.saw_scores(place, HOW, from_scores(logits), (q, k), found.factor)
        finally:
            place.busy = False


def _number(x: Any) -> float | None:
    if isinstance(x, (int, float)):
        return float(x)
    if isinstance(x, Tensor) and x.numel() == 1:
        return float(x)
    return None


def around_forward(model: nn.Module) -> list[Any]:
    """Hooks that have the mode on while the model runs."""
    running: list[Deep] = []

    def begin(module: nn.Module, args: Any) -> None:
        if getattr(module, ATTRIBUTE, None) is None:
            return
        mode = Deep(module)
        mode.__enter__()
        running.append(mode)

    def end(module: nn.Module, args: Any, output: Any) -> None:
        if running:
            running.pop().__exit__(None, None, None)

    return [
        model.register_forward_pre_hook(begin),
        model.register_forward_hook(end, always_call=True),
    ]
