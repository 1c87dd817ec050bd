"""The core as PyTorch operators: `levelhead::attend` and its gradient, for autograd and compile.

Operators take what the core takes: one scale per head, positions, flags; what a caller means by
his arguments is settled above, in `sdpa` and in `levelhead.attention`. Tensors stay where they are,
of any strides; the work runs on PyTorch's own threads. Registered are the CPU kernels, their shapes
for tracing, the gradient, and the gradient's own gradient, which is that of `formula`. What
`torch.func` makes of them is in `transforms`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.library import Library, register_autograd, register_fake

from levelhead import _core
from levelhead.arrays import Array
from levelhead.errors import LevelheadError
from levelhead.state import COUNTS, SUMS
from levelhead.torch import formula

__all__ = ["LevelheadRuntimeError", "Options"]


class LevelheadRuntimeError(LevelheadError, RuntimeError):
    """What PyTorch's own operators would raise a RuntimeError for."""


class Options(NamedTuple):
    """Everything about a call but q, k and v, in the order of the operators' arguments."""

    scale: Tensor  # (H,) float64
    mask: Tensor | None = None  # boolean or additive, broadcastable to (..., H, T, S)
    sinks: Tensor | None = None  # (H,)
    alibi: Tensor | None = None  # (H,) float64
    key_lengths: Tensor | None = None  # (B,) int64, B all leading dimensions as one
    query_segments: Tensor | None = None  # (B, T) int64
    key_segments: Tensor | None = None  # (B, S) int64
    query_start: Tensor | None = None  # (B,) int64; None: 0
    seed: Tensor | None = None  # () int64, of dropout
    cosine: bool = False
    log_n: bool = False
    causal: bool = False
    left: int | None = None
    right: int | None = None
    softcap: float | None = None
    dropout: float = 0.0
    threads: int | None = None  # None: PyTorch's own team


_TENSORS = 9  # the first of the options are tensors
_SCHEMA = (
    "Tensor scale, Tensor? mask, Tensor? sinks, Tensor? alibi, Tensor? key_lengths,"
    " Tensor? query_segments, Tensor? key_segments, Tensor? query_start, Tensor? seed, bool cosine,"
    " bool log_n, bool causal, SymInt? left, SymInt? right, float? softcap, float dropout,"
    " SymInt? threads"
)
WANTED = ("q", "k", "v", "scale", "mask", "sinks")  # what has a gradient, in that order

_library: Any = Library("levelhead", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    f"attend(Tensor q, Tensor k, Tensor v, {_SCHEMA}) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "attend_backward(Tensor dout, Tensor? dlogsumexp, Tensor q, Tensor k, Tensor v, Tensor out,"
    f" Tensor logsumexp, {_SCHEMA}, bool[] wanted)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_core.register_torch(torch)


# ---- statistics on the way


class Pass(NamedTuple):
    """A forward pass that somebody observed: what came in, and the states of its rows."""

    q: Tensor
    k: Tensor
    options: Options
    sums: Array
    counts: Array
    sinks: Array | None


class _Observers(threading.local):
    def __init__(self) -> None:
        self.stack: list[list[Pass]] = []


_observers = _Observers()


def observed() -> bool:
    """Whether somebody in this thread wants to know about forward passes."""
    return bool(_observers.stack)


@contextmanager
def observing() -> Iterator[list[Pass]]:
    """Every forward pass inside leaves its statistics in the list; results keep their bits."""
    seen: list[Pass] = []
    _observers.stack.append(seen)
    try:
        yield seen
    finally:
        _observers.stack.pop()


# ---- the kernels


def wide(dtype: torch.dtype) -> torch.dtype:
    """What is computed in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def memory(x: Tensor) -> Array:
    """A tensor as NumPy sees it, in place; bfloat16 as its bits."""
    x = x.detach().resolve_neg()
    if x.dtype is torch.bfloat16:
        return x.view(torch.int16).numpy().view(np.uint16)
    found: Array = x.numpy()
    return found


def for_core(options: Options, q: Tensor, k: Tensor) -> dict[str, Any]:
    """The options as the core's keywords, and whose threads it runs on."""
    found = {name: x for name, x in options._asdict().items() if x is not None}
    dtypes = {"scale": torch.float64, "sinks": torch.float64, "alibi": torch.float64}
    for name in ("key_lengths", "query_segments", "key_segments", "query_start"):
        dtypes[name] = torch.int64
    for name in dtypes.keys() & found.keys():
        found[name] = memory(found[name].to(dtypes[name]).contiguous())
    if options.mask is not None:
        found["mask"] = memory(options.mask.expand((*q.shape[:-1], k.shape[-2])))
    if options.seed is not None:
        found["seed"] = int(options.seed) % 2**64
    if options.threads is None:
        found |= {"threads": torch.get_num_threads(), "torchs_team": True}
    return found


def _attend(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    out, logsumexp = _attend_shapes(q, k, v)
    options = for_core(Options(*given), q, k)
    into: dict[str, Any] = {"out": memory(out), "logsumexp": memory(logsumexp)}
    if observed():
        rows, real = tuple(q.shape[:-1]), into["logsumexp"].dtype
        into["sums"] = np.empty((*rows, len(SUMS)), real)
        into["counts"] = np.empty((*rows, len(COUNTS)), np.int64)
        seen = Pass(q, k, Options(*given), into["sums"], into["counts"], options.get("sinks"))
        _observers.stack[-1].append(seen)
    _core.forward(memory(q), memory(k), memory(v), **into, **options)
    return out, logsumexp


def _attend_shapes(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    rows = q.shape[:-1]
    return q.new_empty((*rows, v.shape[-1])), q.new_empty(rows, dtype=wide(q.dtype))


def _attend_backward(
    dout: Tensor, dlogsumexp: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    logsumexp: Tensor, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    *given, wanted = rest
    options = Options(*given)
    found = _backward_shapes(dout, dlogsumexp, q, k, v, out, logsumexp, *rest)
    into: dict[str, Any] = {
        f"d{name}": memory(x) for name, x, want in zip(WANTED, found, wanted, strict=True) if want
    }
    if "dmask" in into:
        found[WANTED.index("mask")].zero_()
        shape = (*q.shape[:-1], k.shape[-2])
        strides = np.broadcast_to(into["dmask"], shape).strides
        into["dmask"] = np.lib.stride_tricks.as_strided(into["dmask"], shape, strides)
    per_row = None if dlogsumexp is None else memory(dlogsumexp.to(logsumexp.dtype).contiguous())
    _core.backward(
        memory(dout.to(q.dtype)), memory(q), memory(k), memory(v), memory(out),
        memory(logsumexp.contiguous()), dlogsumexp=per_row, **into, **for_core(options, q, k),
    )  # fmt: skip
    return found


def _backward_shapes(
    dout: Tensor, dlogsumexp: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    logsumexp: Tensor, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Room for every gradient; none for those that are not wanted."""
    *given, wanted = rest
    options = Options(*given)
    of = options._asdict() | {"q": q, "k": k, "v": v}
    dtypes = {"mask": wide(q.dtype), "scale": torch.float64, "sinks": torch.float64}
    return tuple(
        q.new_empty(of[name].shape if want else (0,), dtype=dtypes.get(name, q.dtype))
        for name, want in zip(WANTED, wanted, strict=True)
    )


_library.impl("attend", _attend, "CPU")
_library.impl("attend_backward", _attend_backward, "CPU")
register_fake("levelhead::attend", _attend_shapes, lib=_library)
register_fake("levelhead::attend_backward", _backward_shapes, lib=_library)


# ---- autograd


def remember(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: Options, out: Any) -> None:
    """Keeps in an autograd context what `differentiate` needs; `out` is output and logsumexp."""
    ctx.save_for_backward(q, k, v, *out, *options[:_TENSORS])
    ctx.plain = options[_TENSORS:]
    ctx.set_materialize_grads(False)


def differentiate(
    ctx: Any, dout: Tensor | None, dlogsumexp: Tensor | None, needs: tuple[bool, ...], call: Any
) -> dict[str, Tensor]:
    """Gradients by name, of what `needs` says about q, k, v, scale, mask and sinks; `call` is the
    operator for them, or what stands for it."""
    q, k, v, out, logsumexp, *tensors = ctx.saved_tensors
    options = Options(*tensors, *ctx.plain)
    dout = torch.zeros_like(out) if dout is None else dout
    found = call(dout, dlogsumexp, q, k, v, out, logsumexp, *options, list(needs))
    of = options._asdict() | {"q": q, "k": k, "v": v}
    return {
        name: x.to(of[name].dtype)
        for name, x, need in zip(WANTED, found, needs, strict=True)
        if need
    }


def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """The context of `attend`."""
    q, k, v, *given = inputs
    remember(ctx, q, k, v, Options(*given), output)


def backward(ctx: Any, dout: Tensor | None, dlogsumexp: Tensor | None, call: Any = None) -> Any:
    """The gradient of `attend`."""
    names = ("q", "k", "v", *Options._fields)
    needs = tuple(bool(ctx.needs_input_grad[names.index(name)]) for name in WANTED)
    call = torch.ops.levelhead.attend_backward if call is None else call
    found = differentiate(ctx, dout, dlogsumexp, needs, call)
    return tuple(found.get(name) for name in names)


def setup_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """The context of `attend_backward`."""
    dout, dlogsumexp, q, k, v, _, _, *given, wanted = inputs
    ctx.save_for_backward(dout, dlogsumexp, q, k, v, *given[:_TENSORS])
    ctx.plain, ctx.wanted = given[_TENSORS:], wanted
    ctx.set_materialize_grads(False)


def backward_of_backward(ctx: Any, *asked: Tensor | None) -> tuple[Any, ...]:
    """The gradient of `attend_backward`, which is that of the formula's gradient.

    Output and logsumexp count as functions of q, k and v, not as arguments of their own.
    """
    dout, dlogsumexp, *tensors = ctx.saved_tensors
    names = ("q", "k", "v", *Options._fields)
    given = dict(zip(names, (*tensors, *ctx.plain), strict=True))
    pairs = zip(WANTED, ctx.wanted, asked, strict=True)
    by = {name: x for name, want, x in pairs if want and x is not None}
    if not by:
        return (None,) * len(ctx.needs_input_grad)
    found = formula.second(given, dout, dlogsumexp, by, wide(given["q"].dtype))
    return (found["dout"], found.get("dlogsumexp"), *map(found.get, names[:3]), None, None,
            *map(found.get, names[3:]), None)  # fmt: skip


register_autograd("levelhead::attend", backward, setup_context=setup, lib=_library)
register_autograd(
    "levelhead::attend_backward", backward_of_backward, setup_context=setup_backward, lib=_library
)
