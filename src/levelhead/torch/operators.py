"""The core as PyTorch operators: `levelhead::attend` and its gradient, for autograd and compile.

Operators take q, k, v and the fields of `Scoring`; `sdpa` and `autograd` bring callers' arguments to that form. Tensors
stay where they are, of any strides; the work runs on PyTorch's own threads. Registered are the CPU kernels, their
shapes for tracing, the gradient, and the gradient's own gradient, from `second_order`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.library import Library, register_autograd, register_fake

from levelhead import _core
from levelhead.call.arrays import Array, stretched
from levelhead.call.options import BATCH, FLAG, HEADS, INTEGER, KINDS, MASK, NUMBER, RATE, SEED, TOKENS, Scoring, fields
from levelhead.errors import LevelheadError, expected
from levelhead.gradients import unrounded
from levelhead.state import State, unwritten
from levelhead.torch import second_order


class LevelheadRuntimeError(LevelheadError, RuntimeError):
    """What PyTorch's own operators would raise a RuntimeError for."""


def first_order(backward: Any) -> Any:
    """The backward pass of a Function that has no second derivative. With create_graph=True it is refused: PyTorch's
    `once_differentiable` misses graphs through saved tensors, whose second derivatives would be partial."""

    @wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():  # in a backward pass: create_graph=True
            advice = "Use levelhead.attention, or the plain formula, where you need second derivatives"
            raise LevelheadRuntimeError(expected("create_graph", "False", "True", advice))
        return backward(ctx, *gradients)

    return checked


# The type of a field of `Scoring` in the operators' schema, by its kind; what is absent is None.
_TYPES = dict.fromkeys((HEADS, MASK, BATCH, TOKENS, SEED), "Tensor?")
_TYPES |= {FLAG: "bool", INTEGER: "SymInt?", NUMBER: "float?", RATE: "float"}
TENSORS = len(fields(HEADS, MASK, BATCH, TOKENS, SEED))  # the first fields are tensors
SCHEMA = ", ".join(f"{_TYPES[KINDS[name]]} {name}" for name in Scoring._fields)
# threads None: PyTorch's own team. as_query: the output lies in memory as the query does; contiguous otherwise.
_ARGUMENTS = f"{SCHEMA}, SymInt? threads, bool as_query"
ARGUMENTS = ("q", "k", "v", *Scoring._fields, "threads", "as_query")
WANTED = ("q", "k", "v", "scale", "mask", "sinks")  # what has a gradient, in that order

_library: Any = Library("levelhead", "DEF")  # type: ignore[no-untyped-call]
for _schema in (
    f"attend(Tensor q, Tensor k, Tensor v, {_ARGUMENTS}) -> (Tensor, Tensor)",
    "attend_backward(Tensor dout, Tensor? dlogsumexp, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp,"
    f" {_ARGUMENTS}, bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
):
    _library.define(_schema, tags=torch.Tag.pt2_compliant_tag)
_core.register_torch(torch)


# ---- statistics on the way


class Pass(NamedTuple):
    """An observed forward pass: its inputs, and the states of its rows; sums of None: of other rows than these."""

    q: Tensor
    k: Tensor
    scoring: Scoring
    sums: Array | None
    counts: Array
    sinks: Array | None


class _Observers(threading.local):
    def __init__(self) -> None:
        self.stack: list[list[Pass]] = []


_observers = _Observers()


def observed() -> bool:
    """Whether an observer is active in this thread."""
    return bool(_observers.stack)


@contextmanager
def observing() -> Iterator[list[Pass]]:
    """Every forward pass inside appends its statistics to the list; results keep their bits."""
    passes: list[Pass] = []
    _observers.stack.append(passes)
    try:
        yield passes
    finally:
        _observers.stack.pop()


def report(q: Tensor, k: Tensor, scoring: Scoring, state: State, keywords: dict[str, Any]) -> None:
    """Appends a pass to the list of the observer, if one is active."""
    if observed():
        _observers.stack[-1].append(Pass(q, k, scoring, state.sums, state.counts, keywords.get("sinks")))


def describe_as(q: Tensor, mask: Tensor | None) -> None:
    """The latest pass stands for a call with these queries and this mask: a front end had changed some rows of them."""
    if observed() and _observers.stack[-1]:
        latest = _observers.stack[-1][-1]
        scoring = latest.scoring._replace(mask=None if mask is None else mask.detach())
        _observers.stack[-1][-1] = latest._replace(q=q.detach(), scoring=scoring, sums=None)


# ---- the kernels


def wide(dtype: torch.dtype) -> torch.dtype:
    """What is computed in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def memory(x: Tensor) -> Array:
    """A tensor as NumPy sees it, in place; bfloat16 as its bits."""
    x = x.detach().resolve_neg()
    if x.dtype is torch.bfloat16:
        return x.view(torch.int16).numpy().view(np.uint16)
    return x.numpy()


def uniform(heads: int, factor: float, device: Any = "cpu") -> Tensor:
    """One scale for all heads, as `Scoring` holds it."""
    return torch.full((heads,), factor, dtype=torch.float64, device=device)


_DTYPES = dict.fromkeys(fields(HEADS), torch.float64) | dict.fromkeys(fields(BATCH, TOKENS), torch.int64)


def for_core(scoring: Scoring, q: Tensor, k: Tensor, threads: int | None = None) -> dict[str, Any]:
    """The options as the core's keywords, and the threads it runs on."""
    keywords = scoring.keywords()
    for name in _DTYPES.keys() & keywords.keys():
        keywords[name] = memory(keywords[name].to("cpu", _DTYPES[name]).contiguous())
    if scoring.mask is not None:
        keywords["mask"] = memory(scoring.mask.expand((*q.shape[:-1], k.shape[-2])))
    if "seed" in keywords:
        keywords["seed"] = int(scoring.seed) % 2**64
    team = {"threads": torch.get_num_threads(), "torchs_team": True} if threads is None else {"threads": threads}
    return keywords | team


def unpacked(arguments: Any) -> tuple[Scoring, int | None]:
    """The options in an operator's arguments, and its threads."""
    *values, threads, _ = arguments
    return Scoring(*values), threads


def forward(
    q: Tensor, k: Tensor, v: Tensor, state: State | None, keywords: dict[str, Any], as_query: bool = False
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp; the core writes the rows' states to `state`."""
    out, logsumexp = _attend_shapes(q, k, v, as_query)
    into: dict[str, Any] = {"out": memory(out), "logsumexp": memory(logsumexp)}
    if state is not None:
        into |= {"sums": state.sums, "counts": state.counts, "acc": state.acc}
        if state.first_keys is not None:
            into["first_keys"] = state.first_keys.reshape(keywords["query_segments"].shape)
    _core.forward(memory(q), memory(k), memory(v), **into, **keywords)
    return out, logsumexp


def _attend(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    scoring, threads = unpacked(arguments)
    keywords = for_core(scoring, q, k, threads)
    state = None
    if observed():
        real = np.float64 if q.dtype is torch.float64 else np.float32
        state = unwritten(tuple(q.shape[:-1]), None, real, k.shape[-2])
        report(q, k, scoring, state, keywords)
    return forward(q, k, v, state, keywords, arguments[-1])


def _attend_shapes(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    rows, as_query = q.shape[:-1], arguments[-1]
    out = torch.empty_like(q) if as_query else q.new_empty((*rows, v.shape[-1]))
    return out, q.new_empty(rows, dtype=wide(q.dtype))


def _attend_backward(*inputs: Any) -> tuple[Tensor, ...]:
    dout, dlogsumexp, q, k, v, out, logsumexp, *arguments, wanted = inputs
    scoring, threads = unpacked(arguments)
    gradients = _backward_shapes(*inputs)
    pairs = zip(WANTED, gradients, wanted, strict=True)
    into: dict[str, Any] = {f"d{name}": memory(x) for name, x, want in pairs if want}
    q_memory, k_memory, v_memory, output = (memory(x) for x in (q, k, v, out))
    keywords = for_core(scoring, q, k, threads)
    if "dmask" in into:
        if wide(q.dtype) is not q.dtype:
            output = unrounded(q_memory, k_memory, v_memory, memory(scoring.mask), keywords)
        gradients[WANTED.index("mask")].zero_()
        into["dmask"] = stretched(into["dmask"], (*q.shape[:-1], k.shape[-2]))
    per_row = None if dlogsumexp is None else memory(dlogsumexp.to(logsumexp.dtype).contiguous())
    lse, upstream = memory(logsumexp.contiguous()), memory(dout.to(q.dtype))
    _core.backward(upstream, q_memory, k_memory, v_memory, output, lse, dlogsumexp=per_row, **keywords, **into)
    return gradients


def _backward_shapes(*inputs: Any) -> tuple[Tensor, ...]:
    """Memory for every gradient; none for those that are not wanted."""
    _, _, q, k, v, _, _, *arguments, wanted = inputs
    sources = unpacked(arguments)[0]._asdict() | {"q": q, "k": k, "v": v}
    dtypes = {"mask": wide(q.dtype), "scale": torch.float64, "sinks": torch.float64}
    return tuple(
        # Zeros where the core writes nothing for an empty batch: sums over rows.
        (q.new_zeros if name in ("scale", "sinks") else q.new_empty)(
            sources[name].shape if want else (0,), dtype=dtypes.get(name, q.dtype)
        )
        for name, want in zip(WANTED, wanted, strict=True)
    )


_library.impl("attend", _attend, "CPU")
_library.impl("attend_backward", _attend_backward, "CPU")
register_fake("levelhead::attend", _attend_shapes, lib=_library)
register_fake("levelhead::attend_backward", _backward_shapes, lib=_library)


# ---- autograd


def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """The context of `attend`."""
    q, k, v, *arguments = inputs
    ctx.save_for_backward(q, k, v, *output, *arguments[:TENSORS])
    ctx.plain = arguments[TENSORS:]
    ctx.set_materialize_grads(False)


def backward(
    ctx: Any, dout: Tensor | None, dlogsumexp: Tensor | None, operator: Any = None, names: tuple[str, ...] = ARGUMENTS
) -> tuple[Tensor | None, ...]:
    """The gradient of `attend` by the inputs `names`, from the operator or its `torch.func` twin."""
    needs = [bool(ctx.needs_input_grad[names.index(name)]) for name in WANTED]
    q, k, v, out, logsumexp, *tensors = ctx.saved_tensors
    arguments = (*tensors, *ctx.plain)
    dout = torch.zeros_like(out) if dout is None else dout
    operator = torch.ops.levelhead.attend_backward if operator is None else operator
    results = operator(dout, dlogsumexp, q, k, v, out, logsumexp, *arguments, needs)
    sources = unpacked(arguments)[0]._asdict() | {"q": q, "k": k, "v": v}
    wanted = zip(WANTED, results, needs, strict=True)
    gradients = {name: x.to(sources[name].dtype) for name, x, need in wanted if need}
    return tuple(gradients.get(name) for name in names)


def setup_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """The context of `attend_backward`."""
    dout, dlogsumexp, q, k, v, _, _, *arguments, wanted = inputs
    ctx.save_for_backward(dout, dlogsumexp, q, k, v, *arguments[:TENSORS])
    ctx.plain, ctx.wanted = arguments[TENSORS:], wanted
    ctx.set_materialize_grads(False)


def backward_of_backward(ctx: Any, *incoming: Tensor | None) -> tuple[Any, ...]:
    """The gradient of `attend_backward`, which is that of the formula's gradient.

    Output and logsumexp count as functions of q, k and v, not as arguments of their own.
    """
    dout, dlogsumexp, q, k, v, *tensors = ctx.saved_tensors
    pairs = zip(WANTED, ctx.wanted, incoming, strict=True)
    by = {name: x for name, want, x in pairs if want and x is not None}
    if not by:
        return (None,) * len(ctx.needs_input_grad)
    scoring, _ = unpacked((*tensors, *ctx.plain))
    outer = {"dout": dout} | ({} if dlogsumexp is None else {"dlogsumexp": dlogsumexp})
    gradients = second_order.second({"q": q, "k": k, "v": v}, scoring, outer, by, wide(q.dtype))
    names = ("dout", "dlogsumexp", *ARGUMENTS[:3], "out", "logsumexp", *ARGUMENTS[3:], "wanted")
    return tuple(map(gradients.get, names))


register_autograd("levelhead::attend", backward, setup_context=setup, lib=_library)
register_autograd("levelhead::attend_backward", backward_of_backward, setup_context=setup_backward, lib=_library)
