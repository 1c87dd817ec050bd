"""`deep=True`: softmax attention written by hand, observed below the level of Python functions.

A dispatch mode follows products of two activations through scaling, bias, masks and changes of shape to their softmax;
there the logits are read as they are, with the factors on the way. A product with a parameter on its right is a
projection, which is stored; a softmax over one is a classifier, which is ignored. Compiled parts stay compiled, and
are not followed. The mode is active only while an observed step runs.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.weak import WeakIdKeyDictionary

from levelhead.watching import effective_scale
from levelhead.watching.legacy_constructors import LEGACY_CONSTRUCTORS
from levelhead.watching.measure import from_scores, plain
from levelhead.watching.module_stack import ATTRIBUTE, Frame, Product, current

PATH = "softmax by hand"
Factor: TypeAlias = float | Tensor | None  # None: not one number; a tensor of one element is read later


@dataclass(frozen=True)
class _Product:
    """Scores that are `factor` times left · right, and what was added or hidden since."""

    left: Tensor  # (N, T, D)
    right: Tensor  # (N, D, S)
    factor: Factor

    def turned(self) -> _Product:
        return replace(self, left=self.right.mT, right=self.left.mT)


# Results that still contain the scores of the first argument: in another shape, with more added or hidden.
_KEEPING_NAMES = (
    "view _unsafe_view reshape expand permute transpose unsqueeze squeeze clone _to_copy alias detach select t "
    "contiguous view_as slice add add_ sub sub_ masked_fill masked_fill_ tanh tanh_ clamp clamp_ where maximum "
    "minimum nan_to_num copy_ index_put_ _unsafe_index cat constant_pad_nd addcmul"
)
_KEEPING = set(_KEEPING_NAMES.split())
_SCALING: dict[str, Callable[[Any, Any], Any]] = {
    "mul": lambda factor, x: factor * x,
    "mul_": lambda factor, x: factor * x,
    "div": lambda factor, x: factor / x if isinstance(x, Tensor) or x else math.nan,
    "div_": lambda factor, x: factor / x if isinstance(x, Tensor) or x else math.nan,
}
_SOFTMAX = {"_softmax", "_safe_softmax", "softmax"}
_PRODUCTS = {"bmm": 0, "mm": 0, "baddbmm": 1, "addmm": 1}  # and which argument is the left one


class Deep(TorchDispatchMode):
    """Follows products of activations while the watched model runs."""

    supports_higher_order_operators = True  # such as flex_attention: they run as they are

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled parts stay compiled, and keep their bits."""
        return True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._scores: Any = WeakIdKeyDictionary()
        self._weights = {
            p.untyped_storage().data_ptr(): (name.rsplit(".", 1)[-1], module)
            for module in model.modules()
            for name, p in module.named_parameters(recurse=False)
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        frame = current()
        if frame is None or frame.busy or not isinstance(func, OpOverload) or not frame.watch.wanted():
            return out
        name = func.overloadpacket.__name__
        if name in _SOFTMAX:
            self._softmax(frame, args)
        elif isinstance(out, Tensor) and plain(out):
            product = self._follow(frame, name, args, kwargs or {}, out)
            if product is not None:
                self._scores[out] = product
        return out

    def _follow(
        self, frame: Frame, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor
    ) -> _Product | None:
        if name in _PRODUCTS:
            left = _PRODUCTS[name]
            alpha = float(kwargs.get("alpha", 1))
            return self._product(frame, args[left], args[left + 1], alpha, out)
        inputs = args[0] if name == "cat" else args[:3]
        known = [self._scores.get(x) for x in inputs if isinstance(x, Tensor)]
        before: _Product | None = next((x for x in known if x is not None), None)
        if before is None:
            return None
        first = isinstance(args[0], Tensor) and args[0] in self._scores
        if name in _SCALING:
            number = _number(args[1] if first else args[0])
            if number is None or before.factor is None:
                return replace(before, factor=None)
            return replace(before, factor=_SCALING[name](before.factor, number))
        if name in ("add", "sub") and not first and before.factor is not None:
            return replace(before, factor=before.factor * kwargs.get("alpha", 1))
        if _turns(name, args):
            return before.turned()
        return before if name in _KEEPING else None

    def _product(self, frame: Frame, a: Tensor, b: Tensor, factor: float, out: Tensor) -> _Product | None:
        weight = self._weights.get(b.untyped_storage().data_ptr())
        if weight is None:
            a, b = (x.detach() if x.dim() == 3 else x.detach()[None] for x in (a, b))
            return _Product(a, b, factor)
        name, owner = weight
        if owner is frame.watched.module:  # else its own hook stores it
            frame.ran.append(effective_scale.columns(name, None, a.shape[-1], out))
        return None

    def _softmax(self, frame: Frame, args: tuple[Any, ...]) -> None:
        scores = args[0]
        product = self._scores.get(scores)
        if product is None or scores.dim() < 2 or args[1] not in (-1, scores.dim() - 1):
            return
        T, S = scores.shape[-2:]
        heads = scores.shape[-3] if scores.dim() > 3 else frame.watched.heads or 1
        rows = scores.numel() // max(S, 1)
        if rows == 0 or product.left.numel() != rows * product.left.shape[-1]:
            return
        heads = 1 if rows % (heads * T) else heads
        frame.busy = True  # the measurement itself is not followed
        try:
            logits = scores.detach().reshape(-1, heads, T, S)
            q = product.left.reshape(-1, heads, T, product.left.shape[-1])
            k = product.right.mT
            each = k.shape[0] // q.shape[0] or 1
            each = each if heads % each == 0 and k.shape[0] % each == 0 else 1
            k = k.reshape(-1, each, *k.shape[1:])
            frame.watch.record_call(frame, PATH, from_scores(logits), Product(q, k, product.factor))
        finally:
            frame.busy = False


def _turns(name: str, args: tuple[Any, ...]) -> bool:
    """Whether rows become columns."""
    if name == "t":
        return True
    if name not in ("transpose", "permute"):
        return False
    n = args[0].dim()
    if name == "transpose":
        return {args[1] % n, args[2] % n} == {n - 1, n - 2}
    order = [d % n for d in args[1]]
    return order.index(n - 1) < order.index(n - 2)


def _number(x: Any) -> float | Tensor | None:
    if isinstance(x, Tensor) and x.numel() == 1:
        return x.detach().reshape(())
    return float(x) if isinstance(x, int | float) else None


# ---- active while the model runs


class _Running(threading.local):
    def __init__(self) -> None:
        self.modes: dict[int, Deep] = {}  # by the number of the root module


_running = _Running()


def begin(module: nn.Module, args: Any) -> None:
    """A forward pre-hook of the whole model."""
    watched = getattr(module, ATTRIBUTE, None)
    if torch.compiler.is_compiling() or watched is None or watched.module is not module:
        return
    end(watched.number)  # after Ctrl-C no hook ran, and an old mode remains
    if watched.watch.wanted():
        mode = _running.modes[watched.number] = Deep(module)
        LEGACY_CONSTRUCTORS.hold()
        mode.__enter__()  # type: ignore[no-untyped-call]


def leave(module: nn.Module, args: Any, output: Any) -> None:
    """A forward hook of the whole model, called after exceptions, too."""
    watched = getattr(module, ATTRIBUTE, None)
    if not torch.compiler.is_compiling() and watched is not None and watched.module is module:
        end(watched.number)


def end(number: int) -> None:
    """Removes the mode, if it is still active."""
    mode = _running.modes.pop(number, None)
    if mode is not None:
        LEGACY_CONSTRUCTORS.release()
    if mode is not None and _get_current_dispatch_mode() is mode:
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
