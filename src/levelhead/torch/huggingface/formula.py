"""Attention that a module writes out itself, served where it is softmax(q kᵀ · scale + bias) v.

Within the module's forward a product of two activations is not computed but recorded (`Scores`). Scaling, biases and
masks are recorded with it, then the softmax; when these weights are multiplied by values, levelhead computes the whole.
At anything else the recorded operations run as the module wrote them, so that the result is right in every case. A
tensor of weights that the module returns is computed when somebody reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from levelhead.errors import bad_value
from levelhead.torch import sdpa
from levelhead.torch.huggingface.empty_rows import leveled

_METADATA = {"shape", "dtype", "device", "ndim", "layout", "is_nested", "is_cuda", "requires_grad", "is_sparse"}
_MEASURES = {"size", "dim", "numel", "ndimension", "is_floating_point", "nelement", "__len__", "is_complex"}
_LOWEST = -1e4  # a number that stands for -inf is at most this


@dataclass(frozen=True)
class _Formula:
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

    formula: _Formula
    steps: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...]  # the same as the module wrote it; `_HERE` is itself
    numbers: Tensor | None  # once they are computed
    recorded: bool  # whether gradients were recorded where the product stands

    @staticmethod
    def __new__(cls, formula: _Formula, steps: Any, dtype: torch.dtype) -> Scores:
        made: Scores = torch.Tensor._make_wrapper_subclass(cls, formula.shape, dtype=dtype, device=formula.q.device)
        made.formula, made.steps, made.numbers = formula, steps, None
        made.recorded = torch.is_grad_enabled()
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Outside the module's forward: the numbers are wanted."""
        return _asked(func, args, kwargs or {}) if _is_metadata(func) else func(*_real(args), **_real(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Below Python's functions, where gradients are no longer recorded."""
        found = _real((args, kwargs or {}))
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
                    args, kwargs = tree_map(lambda x, now=value: now if x is _HERE else x, (args, kwargs))
                    value = func(*_real(args), **_real(kwargs))
            self.numbers = value
        return self.numbers


_HERE = object()


def _real(x: Any) -> Any:
    return tree_map(lambda y: y.computed() if isinstance(y, Scores) else y, x)


def _is_metadata(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") in _METADATA
    return name in _MEASURES


def unread(formed: Callable[[], Tensor], q: Tensor, k: Tensor) -> Scores:
    """Weights that `formed` computes when somebody reads them; q has as many heads or more than k."""
    return Scores(_Formula(q, k[..., :1, :, :], p=0.0), ((formed, (), {}),), q.dtype)


def finished(out: Any, *, weights: bool) -> Any:
    """A module's output. Logits are computed now; weights now if they are asked for, else when somebody reads them."""

    def finish(x: Any) -> Any:
        return x.computed() if isinstance(x, Scores) and (weights or x.formula.p is None) else x

    return tree_map(finish, out)


def _asked(func: Any, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


# ---- within the module's forward


def followed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], served: Callable[[], None]) -> Any:
    """The result of a torch function: recorded, or computed. `served` is called for every attention by levelhead."""
    func, args = _simplified(func, args)
    scores = [x for x in args if isinstance(x, Scores)]
    if not scores and not any(isinstance(x, Scores) for x in kwargs.values()):
        new = _product(func, args, kwargs)
        if new is not None:
            return new
        return func(*_real(args), **_real(kwargs))
    if _is_metadata(func):
        return _asked(func, args, kwargs)
    if not torch.is_grad_enabled() and any(x.recorded and x.formula.learns for x in scores):
        given = "scores inside torch.no_grad or in the forward of a torch.autograd.Function"
        raise bad_value("model", "a softmax whose gradients torch records", given, "undo() first")
    if scores and scores[0].numbers is None:
        args = (*(x if x is scores[0] else _real(x) for x in args),)
        name = getattr(func, "__name__", "")
        out = _values(name, func, args, kwargs)
        if out is not None:
            served()
            return out
        step = _STEPS.get(name.strip("_"))
        formula = None if step is None else step(scores[0], args, kwargs)
        if formula is not None:
            return _stepped(scores[0], formula, func, name, args, kwargs)
    return func(*_real(args), **_real(kwargs))


def _simplified(func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The same call, without scores of which only shape or type is wanted, and without a list of operands."""
    name = getattr(func, "__name__", "")
    if name in ("expand_as", "view_as", "reshape_as") and len(args) == 2 and isinstance(args[1], Scores):
        return getattr(Tensor, name.removesuffix("_as")), (args[0], args[1].formula.shape)
    if name == "type_as" and len(args) == 2 and isinstance(args[1], Scores):
        return Tensor.to, (args[0], args[1].dtype)
    if name == "einsum" and len(args) == 2 and isinstance(args[1], (list, tuple)):
        return func, (args[0], *args[1])
    return func, args


def _stepped(scores: Scores, formula: _Formula, func: Any, name: str, args: Any, kwargs: Any) -> Scores:
    here = tree_map(lambda x: _HERE if x is scores else x, (args, kwargs))
    steps = (*scores.steps, (func, *here))
    if (name.endswith("_") and not name.endswith("__")) or name.startswith("__i"):  # in place
        scores.formula, scores.steps = formula, steps
        return scores
    return Scores(formula, steps, _dtype(scores.dtype, name, args, kwargs))


def _dtype(dtype: torch.dtype, name: str, args: Any, kwargs: Any) -> torch.dtype:
    if name == "float":
        return torch.float32
    if name == "type_as":
        other: torch.dtype = args[1].dtype
        return other
    if name in ("to", "type", "softmax"):
        given = [x for x in (*args[1:], *kwargs.values()) if isinstance(x, torch.dtype)]
        return given[0] if given else dtype
    return dtype


def _product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scores | None:
    """A product of two activations with batch dimensions, as scores."""
    name = getattr(func, "__name__", "")
    bias, factor = None, 1.0
    if name in ("matmul", "__matmul__", "bmm") and len(args) == 2 and not kwargs:
        a, b = args
    elif name == "baddbmm":
        given = dict(zip(("input", "batch1", "batch2"), args, strict=False)) | kwargs
        beta, alpha = given.get("beta", 1), given.get("alpha", 1)
        if len(args) > 3 or not isinstance(beta, (int, float)) or not isinstance(alpha, (int, float)):
            return None
        a, b, factor = given["batch1"], given["batch2"], float(alpha)
        bias = None if beta == 0 else given["input"] if beta == 1 else given["input"] * beta
    elif name == "einsum":
        return _einsum_product(args, kwargs)
    else:
        return None
    if not _are_activations(a, b) or a.shape[-1] != b.shape[-2]:
        return None
    made = _Formula(a, b.transpose(-1, -2), factor)
    if bias is not None and (bias.shape != made.shape and not _fits(bias, made.shape)):
        return None
    return Scores(replace(made, bias=bias), ((func, args, kwargs),), a.dtype)


def _are_activations(a: Any, b: Any) -> bool:
    tensors = isinstance(a, Tensor) and isinstance(b, Tensor)
    if not tensors or isinstance(a, nn.Parameter) or isinstance(b, nn.Parameter):
        return False
    plain = type(a) is Tensor and type(b) is Tensor and a.dtype == b.dtype and a.is_floating_point()
    return plain and min(a.dim(), b.dim()) >= 3


def _fits(x: Tensor, shape: torch.Size) -> bool:
    """Whether it broadcasts to the shape, and does not widen it."""
    pairs = zip(reversed(x.shape), reversed(shape), strict=False)
    return x.dim() <= len(shape) and all(n in (1, full) for n, full in pairs)


# ---- steps: what an operation makes of the formula; None: it must be computed


def _other(scores: Scores, args: tuple[Any, ...]) -> Any:
    return _real(args[1] if args[0] is scores else args[0])


def _times(scores: Scores, x: Any) -> _Formula | None:
    formula = scores.formula
    if formula.p is not None or isinstance(x, bool):
        return None
    if isinstance(x, (int, float)):
        bias = None if formula.bias is None else formula.bias * x
        return replace(formula, factor=formula.factor * x, bias=bias)
    if not isinstance(x, Tensor) or not _fits(x, formula.shape) or not x.is_floating_point():
        return None
    if x.dim() >= 2 and (x.shape[-1] != 1 or x.shape[-2] != 1):
        return None
    if x.dim() == 1 and x.shape[0] != 1:
        return None
    bias = None if formula.bias is None else formula.bias * x
    return replace(formula, q=formula.q * x, bias=bias)


def _mul(scores: Scores, args: Any, kwargs: Any) -> _Formula | None:
    return None if kwargs or len(args) != 2 else _times(scores, _other(scores, args))


def _div(scores: Scores, args: Any, kwargs: Any) -> _Formula | None:
    if kwargs or len(args) != 2 or args[0] is not scores:
        return None
    x = args[1]
    if isinstance(x, (int, float)):
        return _times(scores, 1.0 / x) if x else None
    return _times(scores, 1.0 / x) if isinstance(x, Tensor) and x.is_floating_point() else None


def _plus(scores: Scores, x: Any) -> _Formula | None:
    formula = scores.formula
    if formula.p is not None:
        return None
    if isinstance(x, (int, float)):
        return formula  # the same for all keys
    if not isinstance(x, Tensor) or not _fits(x, formula.shape) or not x.is_floating_point():
        return None
    return replace(formula, bias=x if formula.bias is None else formula.bias + x)


def _add(scores: Scores, args: Any, kwargs: Any) -> _Formula | None:
    if kwargs or len(args) != 2:
        return None
    return _plus(scores, _other(scores, args))


def _sub(scores: Scores, args: Any, kwargs: Any) -> _Formula | None:
    if kwargs or len(args) != 2 or args[0] is not scores:
        return None
    return _plus(scores, -args[1])


def _hide(scores: Scores, mask: Any, value: Any) -> _Formula | None:
    """With `value` where the mask is true."""
    formula = scores.formula
    if not isinstance(mask, Tensor) or not _fits(mask, formula.shape):
        return None
    if formula.p is not None:
        return _cleared(formula, mask.bool()) if value == 0 else None
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.requires_grad:
            return None
        value = float(value)
    if not isinstance(value, (int, float)) or value > _LOWEST:
        return None
    mask = mask.bool()
    wide = torch.promote_types(formula.q.dtype, torch.float32)
    bias = torch.zeros((), dtype=wide, device=mask.device) if formula.bias is None else formula.bias.to(wide)
    hidden: Any = -math.inf
    if value > -math.inf:  # see `leveled`
        hidden = torch.where(mask.all(-1, keepdim=True), torch.finfo(wide).min, -math.inf).to(wide)
    return replace(formula, bias=torch.where(mask, hidden, bias))


def _cleared(formula: _Formula, mask: Tensor) -> _Formula | None:
    """Weights with 0 where they are hidden already; a row without keys becomes 0."""
    bias = formula.bias
    if bias is None or bool((mask & (bias > torch.finfo(bias.dtype).min / 2)).any()):
        return None
    return replace(formula, bias=torch.where(mask, -math.inf, bias))


def _masked_fill(scores: Scores, args: Any, kwargs: Any) -> _Formula | None:
    if args[0] is not scores:
        return None
    given = dict(zip(("mask", "value"), args[1:], strict=False)) | kwargs
    return _hide(scores, given.get("mask"), given.get("value")) if set(given) == {"mask", "value"} else None


def _at_least(scores: Scores, args: Any, kwargs: Any) -> _Formula | None:
    """The larger of the logits and the lowest number: only the bias may be lower."""
    formula = scores.formula
    given = args[1] if len(args) == 2 and args[0] is scores else kwargs.get("min")
    if len(args) + len(kwargs) != 2 or formula.p is not None:
        return None
    if isinstance(given, Tensor) and given.numel() == 1 and not given.requires_grad:
        given = float(given)
    if not isinstance(given, (int, float)) or given > torch.finfo(scores.dtype).min / 2:
        return None
    return formula if formula.bias is None else replace(formula, bias=formula.bias.clamp(min=given))


def _where(scores: Scores, args: Any, kwargs: Any) -> _Formula | None:
    if kwargs or len(args) != 3 or not isinstance(args[0], Tensor) or args[0].dtype is not torch.bool:
        return None
    if args[1] is scores:
        return _hide(scores, ~args[0], args[2])
    return _hide(scores, args[0], args[1]) if args[2] is scores else None


def _keep(scores: Scores, args: Any, kwargs: Any) -> _Formula | None:
    """Casts between floating types and copies: levelhead computes in float32 or wider."""
    others = [x for x in (*args[1:], *kwargs.values()) if not isinstance(x, bool)]
    known = all(isinstance(x, (torch.dtype, torch.device, Tensor, str, torch.memory_format)) for x in others)
    dtypes = [x for x in others if isinstance(x, torch.dtype)]
    return scores.formula if known and all(x.is_floating_point for x in dtypes) else None


def _softmax(scores: Scores, args: Any, kwargs: Any) -> _Formula | None:
    given = dict(zip(("dim", "_stacklevel", "dtype"), args[1:], strict=False)) | kwargs
    if "dtype" not in given and isinstance(given.get("_stacklevel"), torch.dtype):
        given["dtype"] = given["_stacklevel"]
    dtype = given.get("dtype")
    usual = given.get("dim") in (-1, scores.dim() - 1) and (dtype is None or dtype.is_floating_point)
    return replace(scores.formula, p=0.0) if usual and scores.formula.p is None and args[0] is scores else None


def _dropout(scores: Scores, args: Any, kwargs: Any) -> _Formula | None:
    given = dict(zip(("p", "training", "inplace"), args[1:], strict=False)) | kwargs
    p = given.get("p", 0.5) if given.get("training", True) else 0.0
    formula = scores.formula
    if p == 0.0:
        return formula
    return replace(formula, p=p) if formula.p == 0.0 and args[0] is scores else None


def _reshape(scores: Scores, args: Any, kwargs: Any) -> _Formula | None:
    """Another division of the leading dimensions."""
    formula = scores.formula
    sizes = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list, torch.Size)) else args[1:]
    if kwargs or not all(isinstance(n, int) for n in sizes) or len(sizes) < 3:
        return None
    T, S = formula.shape[-2:]
    lead = list(sizes[:-2])
    total = math.prod(formula.shape[:-2])
    if lead.count(-1) == 1 and math.prod(lead):
        lead[lead.index(-1)] = total // -math.prod(lead)
    if tuple(sizes[-2:]) not in ((T, S), (T, -1), (-1, S)) or math.prod(lead) != total or -1 in lead:
        return None
    full = formula.shape[:-2]
    q = formula.q.expand(*full, *formula.q.shape[-2:]).reshape(*lead, *formula.q.shape[-2:])
    k = formula.k.expand(*full, *formula.k.shape[-2:]).reshape(*lead, *formula.k.shape[-2:])
    bias = formula.bias
    if bias is not None and bias.dim() > 2:
        bias = bias.expand(*full, *bias.shape[-2:]).reshape(*lead, *bias.shape[-2:])
    return replace(formula, q=q, k=k, bias=bias)


_STEPS: dict[str, Callable[[Scores, Any, Any], _Formula | None]] = {
    **dict.fromkeys(("mul", "rmul", "imul", "multiply"), _mul),
    **dict.fromkeys(("div", "truediv", "itruediv", "divide", "true_divide"), _div),
    **dict.fromkeys(("add", "radd", "iadd"), _add),
    **dict.fromkeys(("sub", "isub"), _sub),
    **dict.fromkeys(("to", "float", "type", "type_as", "contiguous", "clone"), _keep),
    **dict.fromkeys(("view", "reshape"), _reshape),
    **dict.fromkeys(("max", "maximum", "clamp", "clamp_min"), _at_least),
    "masked_fill": _masked_fill,
    "where": _where,
    "softmax": _softmax,
    "dropout": _dropout,
}


# ---- the end: weights times values


def _values(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    if name == "einsum":
        return _einsum_values(args, kwargs)
    if name not in ("matmul", "__matmul__", "bmm") or len(args) != 2 or kwargs or not isinstance(args[0], Scores):
        return None
    return _attended(args[0].formula, args[1])


def _attended(formula: _Formula, v: Any) -> Tensor | None:
    shape = formula.shape
    fits = type(v) is Tensor and v.dim() >= 3 and v.shape[-2] == shape[-1] and v.is_floating_point()
    if not fits or formula.p is None or not _fits(v[..., 0].unsqueeze(-2), shape):
        return None
    q, k, bias = formula.q, formula.k, formula.bias
    if bias is not None and bias.dtype not in (q.dtype, torch.float32):
        bias = bias.to(torch.promote_types(q.dtype, torch.float32))
    q, bias = leveled(q, bias)
    out = sdpa.extended(q, k, v.to(q.dtype), bias, formula.p, scale=float(formula.factor))
    return out.to(v.dtype, copy=out.requires_grad)  # the operator keeps its output: the code may write into this one


# ---- einsum: the same with letters


def _letters(args: Any, kwargs: Any) -> tuple[list[str], str, list[Any]] | None:
    if kwargs or len(args) not in (2, 3) or not isinstance(args[0], str):
        return None
    operands = list(args[1]) if len(args) == 2 and isinstance(args[1], (list, tuple)) else list(args[1:])
    left, arrow, out = args[0].replace(" ", "").partition("->")
    letters = left.split(",")
    plain = arrow and len(letters) == len(operands) == 2 and "." not in args[0]
    return (letters, out, operands) if plain and all(len(set(x)) == len(x) for x in (*letters, out)) else None


def _arranged(x: Tensor, have: str, want: str) -> Tensor:
    """With dimensions in the order of `want`; one that is missing has size 1."""
    x = x.permute([have.index(letter) for letter in want if letter in have])
    for n, letter in enumerate(want):
        if letter not in have:
            x = x.unsqueeze(n)
    return x


def _einsum_product(args: Any, kwargs: Any) -> Scores | None:
    parsed = _letters(args, kwargs)
    if parsed is None or len(parsed[1]) < 3:
        return None
    (one, two), out, (a, b) = parsed
    shared = [letter for letter in one if letter in two and letter not in out]
    if len(shared) != 1 or set(one + two) != set(out) | set(shared) or not _are_activations(a, b):
        return None
    lead, t, s, d = out[:-2], out[-2], out[-1], shared[0]
    if t in two and s in one:
        one, two, a, b = two, one, b, a
    if t in two or s in one or t not in one or s not in two:
        return None
    made = _Formula(_arranged(a, one, lead + t + d), _arranged(b, two, lead + s + d))
    return Scores(made, ((torch.einsum, args, kwargs),), a.dtype)


def _einsum_values(args: Any, kwargs: Any) -> Tensor | None:
    parsed = _letters(args, kwargs)
    if parsed is None or not isinstance(parsed[2][0], Scores):
        return None
    (one, two), out, (weights, v) = parsed
    lead, t, s = one[:-2], one[-2], one[-1]
    rest = [letter for letter in two if letter not in one]
    if s not in two or t in two or s in out or len(rest) != 1 or set(out) != set(lead + t) | set(rest):
        return None
    attended = _attended(weights.formula, _arranged(v, two, lead + s + rest[0]))
    return None if attended is None else attended.permute([(lead + t + rest[0]).index(letter) for letter in out])
