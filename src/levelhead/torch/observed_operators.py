"""Two operators behind `observed_attention`: output and states in one pass of the core, and states alone on a device.

`levelhead::attend_observed` is `levelhead::attend` with the states of its rows: the same bits, the same gradients.
`levelhead::row_states` has no gradient, and chooses its kernel when it runs. Both are opaque to the compiler.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_autograd, register_fake

from levelhead import front_ends
from levelhead.call.options import Scoring
from levelhead.device.choice import TORCH, TRITON, choice
from levelhead.state import COUNTS, SUMS, State
from levelhead.torch import operators
from levelhead.torch.operators import SCHEMA, memory, wide

_library: Any = Library("levelhead", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema in (
    f"attend_observed(Tensor q, Tensor k, Tensor v, {SCHEMA}, SymInt? threads, Tensor? first_keys) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    f"row_states(Tensor q, Tensor k, {SCHEMA}, Tensor? first_keys, SymInt? start) -> (Tensor, Tensor)",
):
    _library.define(_schema, tags=torch.Tag.pt2_compliant_tag)
_NAMES = ("q", "k", "v", *Scoring._fields, "threads", "first_keys")


def attend_observed(
    q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, threads: int | None, first_keys: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, sums and counts."""
    out, _, sums, counts = torch.ops.levelhead.attend_observed(q, k, v, *scoring, threads, first_keys)
    return out, sums, counts


def row_states(
    q: Tensor, k: Tensor, scoring: Scoring, first_keys: Tensor | None, start: int | None
) -> tuple[Tensor, Tensor]:
    """Sums and counts of q (B, H, T, D) and k (B, G, S, D); detached."""
    detached = (x.detach() if isinstance(x, Tensor) else x for x in scoring._replace(seed=None, dropout=0.0))
    found: tuple[Tensor, Tensor] = torch.ops.levelhead.row_states(q.detach(), k.detach(), *detached, first_keys, start)
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def path_on(device: str) -> str:
    """Who computes statistics on a device: the core, the Triton kernel or plain torch; a graph keeps what it found."""
    return choice(device).path


def path_of_states(q: Tensor, k: Tensor) -> str:
    """Who computes `row_states` of these: the Triton kernel, or plain torch, which also knows float64."""
    by_kernel = path_on(q.device.type) == TRITON and q.dtype is not torch.float64
    return TRITON if by_kernel and q.numel() > 0 and k.numel() > 0 else TORCH


# ---- by the core


def _attend_observed(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *values, threads, first_keys = arguments
    scoring = Scoring(*values)
    keywords = operators.for_core(scoring, q, k, threads)
    sums, counts = _state_shapes(q)
    first = None if first_keys is None else memory(first_keys)
    state = State(memory(sums), memory(counts), None, k.shape[-2], first)
    output = operators.forward(q, k, v, state, keywords)
    operators.report(q, k, scoring, state, keywords)
    return (*output, sums, counts)


def _attend_shapes(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    rows = q.shape[:-1]
    return q.new_empty((*rows, v.shape[-1])), q.new_empty(rows, dtype=wide(q.dtype)), *_state_shapes(q)


def _state_shapes(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    sums = q.new_empty((*q.shape[:-1], len(SUMS)), dtype=wide(q.dtype))
    return sums, q.new_empty((*q.shape[:-1], len(COUNTS)), dtype=torch.int64)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *called, _ = inputs
    operators.setup(ctx, (*called, False), output[:2])  # type: ignore[arg-type]
    ctx.mark_non_differentiable(*output[2:])


def _backward(ctx: Any, dout: Tensor | None, dlogsumexp: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    return operators.backward(ctx, dout, dlogsumexp, names=_NAMES)


_library.impl("attend_observed", _attend_observed, "CPU")
register_fake("levelhead::attend_observed", _attend_shapes, lib=_library)
register_autograd("levelhead::attend_observed", _backward, setup_context=_setup, lib=_library)


# ---- on a device


def _row_states(q: Tensor, k: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *values, first_keys, start = arguments
    serving = front_ends.serving("torch", "row states")
    sums, counts = serving.row_states(q, k, Scoring(*values), first_keys, start)
    return sums.contiguous(), counts.contiguous()  # the kernel writes a column after another


_library.impl("row_states", _row_states, "CompositeExplicitAutograd")
register_fake("levelhead::row_states", _state_shapes, lib=_library)
