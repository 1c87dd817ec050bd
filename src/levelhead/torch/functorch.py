"""The way into the operators, and what `torch.func` and vmap make of them.

A call in eager mode or under compile is the operator's. Inside `torch.func.grad`, `jacrev` and
their kin it is that of a Function with the same gradient, because PyTorch's own registration does
not reach there. vmap joins the leading dimensions where the core can tell examples apart, and goes
through them one by one where it cannot. Forward-mode derivatives are refused.
"""

from __future__ import annotations

import sys
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import register_vmap

from levelhead.torch import operators
from levelhead.torch.operators import LevelheadRuntimeError, Options

__all__ = ["attend", "untraced"]


def attend(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Output and logsumexp, differentiable by q, k, v, scale, a float mask and sinks."""
    if torch.compiler.is_compiling():
        out, logsumexp = torch.ops.levelhead.attend(q, k, v, *options)
    else:
        _refuse_tangents(q, k, v, options.scale, options.mask, options.sinks)
        out, logsumexp = _attend(q, k, v, *options)
    return out, logsumexp


def _refuse_tangents(*given: Any) -> None:
    """Stops what is computed with dual numbers, whose other half would be lost."""
    if forward_ad._current_level < 0:
        return
    unpack: Any = forward_ad.unpack_dual
    for x in given:
        learns = isinstance(x, Tensor) and x.is_floating_point()
        if learns and unpack(x).tangent is not None:
            raise LevelheadRuntimeError(
                "levelhead: expected a derivative in reverse mode, got a dual tensor (jvp, jacfwd,"
                " hessian). Use torch.func.vjp or jacrev; jacrev(jacrev(f)) is a Hessian."
            )


def _attend(*given: Any) -> Any:
    return _either(_Attend, torch.ops.levelhead.attend)(*given)


def _attend_backward(*given: Any) -> Any:
    return _either(_AttendBackward, torch.ops.levelhead.attend_backward)(*given)


def _either(function: Any, operator: Any) -> Any:
    return function.apply if torch._C._are_functorch_transforms_active() else operator


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(*given: Any) -> Any:
        return torch.ops.levelhead.attend(*given)

    setup_context = staticmethod(operators.setup)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlogsumexp: Tensor | None) -> Any:
        return operators.backward(ctx, dout, dlogsumexp, _attend_backward)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *given: Any) -> Any:
        return _joined(_attend, info, in_dims, *given)


class _AttendBackward(torch.autograd.Function):
    @staticmethod
    def forward(*given: Any) -> Any:
        return torch.ops.levelhead.attend_backward(*given)

    setup_context = staticmethod(operators.setup_backward)
    backward = staticmethod(operators.backward_of_backward)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *given: Any) -> Any:
        return _one_by_one(_attend_backward, info, in_dims, *given)


# ---- compile


def untraced(call: Any) -> Any:
    """The call as one break in the graph of whoever compiles it, for what cannot be traced."""
    out_of_sight: list[Any] = []

    @wraps(call)
    def run(*given: Any, **options: Any) -> Any:
        if "torch._dynamo" not in sys.modules:  # a second to import, and nobody compiles yet
            return call(*given, **options)
        if not out_of_sight:
            out_of_sight.append(torch.compiler.disable(call))  # type: ignore[no-untyped-call]
        return out_of_sight[0](*given, **options)

    return run


# ---- vmap


def _one_by_one(call: Any, info: Any, in_dims: Any, *given: Any) -> Any:
    """Every example by itself, each on all threads."""
    dims = [dim if isinstance(x, Tensor) else None for x, dim in zip(given, in_dims, strict=True)]
    each = [
        call(*(x if dim is None else x.select(dim, i) for x, dim in zip(given, dims, strict=True)))
        for i in range(info.batch_size)
    ]
    stacked = tuple(torch.stack(parts) for parts in zip(*each, strict=True))
    return stacked, (0,) * len(stacked)


def _joined(call: Any, info: Any, in_dims: Any, q: Tensor, k: Tensor, v: Tensor, *given: Any) -> Any:
    """One more leading dimension; what is given per batch row is repeated or flattened."""
    dims = dict(zip(("q", "k", "v", *Options._fields), in_dims, strict=True))
    options = Options(*given)
    own = any(dims[name] is not None for name in ("scale", "sinks", "alibi", "seed"))
    if own or options.dropout:  # the core has one of each, and drops other weights in other rows
        return _one_by_one(call, info, in_dims, q, k, v, *given)

    def spread(name: str, x: Tensor) -> Tensor:
        if dims[name] is not None:
            return x.movedim(dims[name], 0)
        return x.expand((info.batch_size, *x.shape))

    rank = q.dim() - (dims["q"] is not None)
    changed: dict[str, Any] = {}
    if options.mask is not None and dims["mask"] is not None:
        mask = spread("mask", options.mask)
        missing = (1,) * (rank + 1 - mask.dim())
        changed["mask"] = mask.reshape((mask.shape[0], *missing, *mask.shape[1:]))
    for name in ("key_lengths", "query_segments", "key_segments", "query_start"):
        x = getattr(options, name)
        if x is not None:
            changed[name] = spread(name, x).flatten(0, 1)
    arrays = (spread(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    return call(*arrays, *options._replace(**changed)), (0, 0)


# Functions of torch.func cannot be called from inside the rule of an operator.
register_vmap("levelhead::attend", partial(_joined, torch.ops.levelhead.attend))
register_vmap("levelhead::attend_backward", partial(_one_by_one, torch.ops.levelhead.attend_backward))
