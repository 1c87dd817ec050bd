"""Attention that a module writes out itself, served where it is softmax(q kᵀ · scale + bias) v.

Within the module's forward a product of two activations is not computed but recorded (`Scores`). Scaling, biases and
masks are recorded with it, then the softmax; when these weights are multiplied by values, levelhead computes the whole.
At anything else the recorded operations run as the module wrote them, so that the result is right in every case. A
tensor of weights that the module returns is computed when somebody reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from levelhead.errors import bad_value
from levelhead.torch import sdpa
from levelhead.torch.huggingface.empty_rows import as_given, leveled
from levelhead.torch.huggingface.formula_steps import STEPS
from levelhead.torch.huggingface.scores import HERE, Formula, Scores, asked, fits, is_metadata, real

# ---- within the module's forward


def followed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], served: Callable[[], None]) -> Any:
    """The result of a torch function: recorded, or computed. `served` is called for every attention by levelhead."""
    func, args = _simplified(func, args)
    scores = [x for x in args if isinstance(x, Scores)]
    if not scores and not any(isinstance(x, Scores) for x in kwargs.values()):
        new = _product(func, args, kwargs)
        if new is not None:
            return new
        return func(*real(args), **real(kwargs))
    if is_metadata(func):
        return asked(func, args, kwargs)
    if not torch.is_grad_enabled() and any(x.recorded and x.formula.learns for x in scores):
        given = "scores inside torch.no_grad or in the forward of a torch.autograd.Function"
        raise bad_value("model", "a softmax whose gradients torch records", given, "undo() first")
    if scores and scores[0].numbers is None:
        args = (*(x if x is scores[0] else real(x) for x in args),)
        name = getattr(func, "__name__", "")
        out = _values(name, func, args, kwargs)
        if out is not None:
            served()
            return out
        step = STEPS.get(name.strip("_"))
        formula = None if step is None else step(scores[0], args, kwargs)
        if formula is not None:
            return _stepped(scores[0], formula, func, name, args, kwargs)
    return func(*real(args), **real(kwargs))


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


def _stepped(scores: Scores, formula: Formula, func: Any, name: str, args: Any, kwargs: Any) -> Scores:
    here = tree_map(lambda x: HERE if x is scores else x, (args, kwargs))
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
    made = Formula(a, b.transpose(-1, -2), factor)
    if bias is not None and (bias.shape != made.shape and not fits(bias, made.shape)):
        return None
    return Scores(replace(made, bias=bias), ((func, args, kwargs),), a.dtype)


def _are_activations(a: Any, b: Any) -> bool:
    tensors = isinstance(a, Tensor) and isinstance(b, Tensor)
    if not tensors or isinstance(a, nn.Parameter) or isinstance(b, nn.Parameter):
        return False
    plain = type(a) is Tensor and type(b) is Tensor and a.dtype == b.dtype and a.is_floating_point()
    return plain and min(a.dim(), b.dim()) >= 3


# ---- the end: weights times values


def _values(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    if name == "einsum":
        return _einsum_values(args, kwargs)
    if name not in ("matmul", "__matmul__", "bmm") or len(args) != 2 or kwargs or not isinstance(args[0], Scores):
        return None
    return _attended(args[0].formula, args[1])


def _attended(formula: Formula, v: Any) -> Tensor | None:
    shape = formula.shape
    usable = type(v) is Tensor and v.dim() >= 3 and v.shape[-2] == shape[-1] and v.is_floating_point()
    if not usable or formula.p is None or not fits(v[..., 0].unsqueeze(-2), shape):
        return None
    q, k, bias = formula.q, formula.k, formula.bias
    if bias is not None and bias.dtype not in (q.dtype, torch.float32):
        bias = bias.to(torch.promote_types(q.dtype, torch.float32))
    out = computed(q, k, v.to(q.dtype), bias, formula.p, float(formula.factor))
    return out.to(v.dtype, copy=out.requires_grad)  # the operator keeps its output: the code may write into this one


def computed(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: float, scale: float) -> Tensor:
    """The attention that a formula is."""
    level, level_bias = leveled(q, bias)
    out = sdpa.extended(level, k, v, level_bias, dropout, scale=scale)
    as_given(level, q, bias)
    return out


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
    made = Formula(_arranged(a, one, lead + t + d), _arranged(b, two, lead + s + d))
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
