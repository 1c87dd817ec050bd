"""What an operation makes of recorded scores: the formula after it, or None if they must be computed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from levelhead.torch.huggingface.scores import Formula, Scores, fits, real

_LOWEST = -1e4  # a number that stands for -inf is at most this


def _other(scores: Scores, args: tuple[Any, ...]) -> Any:
    return real(args[1] if args[0] is scores else args[0])


def _times(scores: Scores, x: Any) -> Formula | None:
    formula = scores.formula
    if formula.p is not None or isinstance(x, bool):
        return None
    if isinstance(x, (int, float)):
        bias = None if formula.bias is None else formula.bias * x
        return replace(formula, factor=formula.factor * x, bias=bias)
    if not isinstance(x, Tensor) or not fits(x, formula.shape) or not x.is_floating_point():
        return None
    if x.dim() >= 2 and (x.shape[-1] != 1 or x.shape[-2] != 1):
        return None
    if x.dim() == 1 and x.shape[0] != 1:
        return None
    bias = None if formula.bias is None else formula.bias * x
    return replace(formula, q=formula.q * x, bias=bias)


def _mul(scores: Scores, args: Any, kwargs: Any) -> Formula | None:
    return None if kwargs or len(args) != 2 else _times(scores, _other(scores, args))


def _div(scores: Scores, args: Any, kwargs: Any) -> Formula | None:
    if kwargs or len(args) != 2 or args[0] is not scores:
        return None
    x = args[1]
    if isinstance(x, (int, float)):
        return _times(scores, 1.0 / x) if x else None
    return _times(scores, 1.0 / x) if isinstance(x, Tensor) and x.is_floating_point() else None


def _plus(scores: Scores, x: Any) -> Formula | None:
    formula = scores.formula
    if formula.p is not None:
        return None
    if isinstance(x, (int, float)):
        return formula  # the same for all keys
    if not isinstance(x, Tensor) or not fits(x, formula.shape) or not x.is_floating_point():
        return None
    return replace(formula, bias=x if formula.bias is None else formula.bias + x)


def _add(scores: Scores, args: Any, kwargs: Any) -> Formula | None:
    if kwargs or len(args) != 2:
        return None
    return _plus(scores, _other(scores, args))


def _sub(scores: Scores, args: Any, kwargs: Any) -> Formula | None:
    if kwargs or len(args) != 2 or args[0] is not scores:
        return None
    return _plus(scores, -args[1])


def _hide(scores: Scores, mask: Any, value: Any) -> Formula | None:
    """With `value` where the mask is true."""
    formula = scores.formula
    if not isinstance(mask, Tensor) or not fits(mask, formula.shape):
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


def _cleared(formula: Formula, mask: Tensor) -> Formula | None:
    """Weights with 0 where they are hidden already; a row without keys becomes 0."""
    bias = formula.bias
    if bias is None or bool((mask & (bias > torch.finfo(bias.dtype).min / 2)).any()):
        return None
    return replace(formula, bias=torch.where(mask, -math.inf, bias))


def _masked_fill(scores: Scores, args: Any, kwargs: Any) -> Formula | None:
    if args[0] is not scores:
        return None
    given = dict(zip(("mask", "value"), args[1:], strict=False)) | kwargs
    return _hide(scores, given.get("mask"), given.get("value")) if set(given) == {"mask", "value"} else None


def _at_least(scores: Scores, args: Any, kwargs: Any) -> Formula | None:
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


def _where(scores: Scores, args: Any, kwargs: Any) -> Formula | None:
    if kwargs or len(args) != 3 or not isinstance(args[0], Tensor) or args[0].dtype is not torch.bool:
        return None
    if args[1] is scores:
        return _hide(scores, ~args[0], args[2])
    return _hide(scores, args[0], args[1]) if args[2] is scores else None


def _keep(scores: Scores, args: Any, kwargs: Any) -> Formula | None:
    """Casts between floating types and copies: levelhead computes in float32 or wider."""
    others = [x for x in (*args[1:], *kwargs.values()) if not isinstance(x, bool)]
    known = all(isinstance(x, (torch.dtype, torch.device, Tensor, str, torch.memory_format)) for x in others)
    dtypes = [x for x in others if isinstance(x, torch.dtype)]
    return scores.formula if known and all(x.is_floating_point for x in dtypes) else None


def _softmax(scores: Scores, args: Any, kwargs: Any) -> Formula | None:
    given = dict(zip(("dim", "_stacklevel", "dtype"), args[1:], strict=False)) | kwargs
    if "dtype" not in given and isinstance(given.get("_stacklevel"), torch.dtype):
        given["dtype"] = given["_stacklevel"]
    dtype = given.get("dtype")
    usual = given.get("dim") in (-1, scores.dim() - 1) and (dtype is None or dtype.is_floating_point)
    return replace(scores.formula, p=0.0) if usual and scores.formula.p is None and args[0] is scores else None


def _dropout(scores: Scores, args: Any, kwargs: Any) -> Formula | None:
    given = dict(zip(("p", "training", "inplace"), args[1:], strict=False)) | kwargs
    p = given.get("p", 0.5) if given.get("training", True) else 0.0
    formula = scores.formula
    if p == 0.0:
        return formula
    return replace(formula, p=p) if formula.p == 0.0 and args[0] is scores else None


def _reshape(scores: Scores, args: Any, kwargs: Any) -> Formula | None:
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


STEPS: dict[str, Callable[[Scores, Any, Any], Formula | None]] = {
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
