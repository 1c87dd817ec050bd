"""`attend` calls the operator, or its twin for gradients; the rules of vmap; what is kept out of compiled graphs.

The twin is an autograd Function with the operator's gradient. `torch.func.grad`, `jacrev` and the like need it, because
the gradients registered with PyTorch do not apply there; elsewhere it is faster. vmap adds a
leading dimension where the core can tell examples apart, and loops over examples where it cannot. Forward mode runs the
plain formula, which stores the logits.
"""

from __future__ import annotations

import sys
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import register_vmap

from levelhead.call.options import BATCH, HEADS, SEED, TOKENS, Scoring, fields
from levelhead.errors import bad_value
from levelhead.torch import operators, second_order


def attend(
    q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, threads: int | None = None, as_query: bool = False
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp, differentiable by q, k, v, scale, a float mask and sinks. as_query: the output has the
    query's strides; it must have its shape. Inside `torch.func` strides are free."""
    compiling = torch.compiler.is_compiling()
    transformed: bool = torch._C._are_functorch_transforms_active()
    if scoring.dropout and transformed and forward_ad._current_level >= 0:  # the seed that decides has no number there
        advice = "Use reverse mode, torch.func.grad or vjp"
        raise bad_value("dropout", "0 in forward mode inside torch.func", scoring.dropout, advice)
    # In a graph the operator has no gradient and no tangent for torch.func; Dynamo cannot tell transforms apart.
    in_graph = transformed and not scoring.dropout
    if in_graph if compiling else _has_tangents(q, k, v, scoring.scale, scoring.mask, scoring.sinks):
        out, logsumexp = second_order.forward_mode(q, k, v, scoring, operators.wide(q.dtype))
        return out.to(q.dtype), logsumexp
    out, logsumexp = (torch.ops.levelhead.attend if compiling else _attend)(q, k, v, *scoring, threads, as_query)
    return out, logsumexp


def seed_is_unknown() -> bool:
    """Whether the seed of dropout has no number: in a graph, inside a transformation of torch.func in reverse mode."""
    if not torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return False
    transformed: bool = torch._C._are_functorch_transforms_active()
    return transformed


def _has_tangents(*inputs: Any) -> bool:
    """Whether forward mode follows an input. Inside `torch.func` an inner level may hide it: all count."""
    if forward_ad._current_level < 0:
        return False
    if torch._C._are_functorch_transforms_active():
        return True
    unpack: Any = forward_ad.unpack_dual
    return any(isinstance(x, Tensor) and x.is_floating_point() and unpack(x).tangent is not None for x in inputs)


# ---- vmap


def _one_by_one(call: Any, info: Any, in_dims: Any, *inputs: Any) -> Any:
    """Every example by itself, each on all threads."""
    pairs = [(x, dim if isinstance(x, Tensor) else None) for x, dim in zip(inputs, in_dims, strict=True)]
    each = [call(*(x if dim is None else x.select(dim, i) for x, dim in pairs)) for i in range(info.batch_size)]
    stacked = tuple(torch.stack(parts) for parts in zip(*each, strict=True))
    return stacked, (0,) * len(stacked)


def _joined(operator: Any, info: Any, in_dims: Any, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Any:
    """One more leading dimension; options with one value per batch row are repeated or flattened."""
    dims = dict(zip(operators.ARGUMENTS, in_dims, strict=True))
    scoring, threads = operators.unpacked(arguments)
    # The core has one value of these for the whole call, and drops other weights in other batch rows.
    if scoring.dropout or any(dims[name] is not None for name in fields(HEADS, SEED)):
        return _one_by_one(operator, info, in_dims, q, k, v, *arguments)

    def spread(name: str, x: Tensor) -> Tensor:
        if dims[name] is not None:
            return x.movedim(dims[name], 0)
        return x.expand((info.batch_size, *x.shape))

    rank = q.dim() - (dims["q"] is not None)
    changed: dict[str, Any] = {}
    if scoring.mask is not None and dims["mask"] is not None:
        mask = spread("mask", scoring.mask)
        missing = (1,) * (rank + 1 - mask.dim())
        changed["mask"] = mask.reshape((mask.shape[0], *missing, *mask.shape[1:]))
    for name in fields(BATCH, TOKENS):
        x = getattr(scoring, name)
        if x is not None:
            changed[name] = spread(name, x).flatten(0, 1)
    arrays = (spread(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    return operator(*arrays, *scoring._replace(**changed), threads, False), (0, 0)


# Functions of torch.func cannot be called from inside the rule of an operator.
register_vmap("levelhead::attend", partial(_joined, torch.ops.levelhead.attend))
register_vmap("levelhead::attend_backward", partial(_one_by_one, torch.ops.levelhead.attend_backward))


# ---- twins


def _only_functionalized() -> bool:
    """Inside `torch.func.functionalize` and nothing else: it knows operators, but no autograd Function."""
    if not torch._C._are_functorch_transforms_active():
        return False
    stack: Any = torch._C._functorch.get_interpreter_stack()
    return all(level.key() == torch._C._functorch.TransformType.Functionalize for level in stack or ())


def _twin(operator: Any, setup: Any, gradient: Any, rule: Any) -> Any:
    """Calls the operator, or an autograd Function with its gradient and its rule of vmap.

    PyTorch takes a quarter of a tiny call to prepare a gradient that was registered with an operator. A trace records
    the operator.
    """

    class Twin(torch.autograd.Function):
        setup_context = staticmethod(setup)
        backward = staticmethod(gradient)

        @staticmethod
        def forward(*inputs: Any) -> Any:
            return operator(*inputs)

        @staticmethod
        def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
            return rule(call, info, in_dims, *inputs)

    def call(*inputs: Any) -> Any:
        recorded = torch.is_grad_enabled() and torch._C._get_tracing_state() is None
        twin = (recorded or torch._C._are_functorch_transforms_active()) and not _only_functionalized()
        return (Twin.apply if twin else operator)(*inputs)

    return call


_attend_backward = _twin(
    torch.ops.levelhead.attend_backward, operators.setup_backward, operators.backward_of_backward, _one_by_one
)
_attend = _twin(
    torch.ops.levelhead.attend, operators.setup, partial(operators.backward, operator=_attend_backward), _joined
)


# ---- compile


def untraced(call: Any) -> Any:
    """The call as one graph break under compile, for code that Dynamo cannot trace."""
    disabled: list[Any] = []

    @wraps(call)
    def run(*args: Any, **options: Any) -> Any:
        if "torch._dynamo" not in sys.modules:  # a second to import, and nothing is compiled yet
            return call(*args, **options)
        if not disabled:
            disabled.append(torch.compiler.disable(call))  # type: ignore[no-untyped-call]
        return disabled[0](*args, **options)

    return run
