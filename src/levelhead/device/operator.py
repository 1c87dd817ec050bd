"""`levelhead::observe`: the state of every query row as a PyTorch operator, without values and without gradients.

The Triton kernel runs behind it, on CUDA and ROCm tensors; on CPU tensors under Triton's interpreter. The operator is
opaque to the compiler: it stays one node of a graph, and the kernel is chosen when the graph runs. `triton_op` would
show the kernel to inductor, which has nothing to fuse with it (q and k are outputs of products, its own outputs a few
numbers per row), and would fix block sizes, path and fallback while tracing. Registered are the kernel, shapes for
tracing, the absence of gradients, and `vmap`. Triton is imported with the first launch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_autograd, register_fake, register_vmap

from levelhead.call.options import BATCH, KINDS, MASK, TOKENS, Scoring
from levelhead.errors import bad_type, bad_value
from levelhead.state import COUNTS, SUMS
from levelhead.torch.operators import SCHEMA

TYPES = (torch.float32, torch.float16, torch.bfloat16)
_FIELDS = len(Scoring._fields)

_library: Any = Library("levelhead", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    f"observe(Tensor q, Tensor k, {SCHEMA}, Tensor? rows=None, Tensor? first_keys=None, Tensor? hiding=None, "
    "int parts=0) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)


def observe(
    q: Tensor,
    k: Tensor,
    scoring: Scoring,
    rows: Tensor | None = None,
    first_keys: Tensor | None = None,
    hiding: Tensor | None = None,
    parts: int = 0,
) -> tuple[Tensor, Tensor]:
    """Sums (B, H, R, 8), float32, and counts (B, H, R, 2), as `state` lays them out.

    Args:
        q, k: (B, H, T, D) and (B, G, S, D), float32, float16 or bfloat16, of any strides.
        scoring: the options, of tensors on q's device; dropout and sinks are no part of a state.
        rows: (B, R) the rows of q that are wanted, by their places, or (R,) of every batch row; None: all.
        first_keys: (B, R) the first key of each row's document, -1 for none; None: key 0.
        hiding: the largest number of an additive mask that hides a key, one number; None: -inf alone.
        parts: into how many ranges of keys the work is divided; 0: as many as keep the device busy.
    """
    scoring = scoring._replace(seed=None, dropout=0.0)
    found: tuple[Tensor, Tensor] = torch.ops.levelhead.observe(q, k, *scoring, rows, first_keys, hiding, parts)
    return found


def tallied(sums: Tensor, counts: Tensor, sinks: Tensor | None, used: Tensor | None, places: Tensor | None) -> Tensor:
    """The tally (B, H, columns) of such states, by the kernel beside it: no operator, it is not traced."""
    from levelhead.device import launch  # imports Triton

    return launch.tallied(sums, counts, sinks, used, places)


def hiding(mask: Tensor, reach: Tensor) -> Tensor:
    """`masks.hiding` of a mask of a type that the kernels read."""
    from levelhead.device import launch  # imports Triton

    return launch.hiding(mask, reach)


def _observe(q: Tensor, k: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    scoring, (rows, first_keys, hiding, parts) = _unpacked(arguments)
    _check(q, k, scoring)
    from levelhead.device import launch  # imports Triton

    sums, counts = _shapes(q, k, *arguments)
    if q.device.type == "cpu" and not launch.INTERPRETED:
        advice = "Call levelhead.observe for CPU tensors, or set TRITON_INTERPRET=1 to run the kernel interpreted"
        raise bad_type("q", "a tensor on CUDA or ROCm", "a CPU tensor", advice)
    if sums.numel():
        launch.observe(q, k, scoring, rows, first_keys, hiding, parts, sums, counts)
    return sums, counts


def _shapes(q: Tensor, k: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Memory for the states: a column after another, seen as (B, H, R, columns)."""
    rows = arguments[_FIELDS] if len(arguments) > _FIELDS else None
    lead = (*q.shape[:2], q.shape[2] if rows is None else rows.shape[-1])
    sums = q.new_empty((len(SUMS), *lead), dtype=torch.float32)
    counts = q.new_empty((len(COUNTS), *lead), dtype=torch.int64)
    return sums.permute(1, 2, 3, 0), counts.permute(1, 2, 3, 0)


def _unpacked(arguments: tuple[Any, ...]) -> tuple[Scoring, tuple[Any, ...]]:
    further = (*arguments[_FIELDS:], *(None, None, None, 0)[len(arguments) - _FIELDS :])
    return Scoring(*arguments[:_FIELDS]), further


def _check(q: Tensor, k: Tensor, scoring: Scoring) -> None:
    if q.dtype not in TYPES or k.dtype not in TYPES:
        advice = "Cast q and k, or call levelhead.observe for float64 on a CPU"
        raise bad_type("q and k", "float32, float16 or bfloat16", f"{q.dtype} and {k.dtype}", advice)
    shapes = f"{tuple(q.shape)} and {tuple(k.shape)}"
    alike = q.dim() == k.dim() == 4 and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    if not alike or (q.shape[1] and (not k.shape[1] or q.shape[1] % k.shape[1])):
        raise bad_value("q and k", "(B, H, T, D) and (B, G, S, D), H a multiple of G", shapes, "Reshape to four axes")
    if len(scoring.scale) != q.shape[1]:
        raise bad_value("scale", f"one number per head, ({q.shape[1]},)", tuple(scoring.scale.shape), "Expand it")


_library.impl("observe", _observe, "CUDA")
_library.impl("observe", _observe, "CPU")
register_fake("levelhead::observe", _shapes, lib=_library)


# ---- no gradients


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(*output)
    ctx.inputs = len(inputs)


def _no_gradients(ctx: Any, *gradients: Any) -> tuple[None, ...]:
    none: tuple[None, ...] = (None,) * ctx.inputs
    return none


register_autograd("levelhead::observe", _no_gradients, setup_context=_setup, lib=_library)


# ---- vmap: one more batch axis


def _mapped(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
    V = info.batch_size
    names = ("q", "k", *Scoring._fields, "rows", "first_keys", "hiding", "parts")
    given = dict(zip(names, zip(arguments, in_dims, strict=True), strict=False))
    B = _front(*given["q"], V).shape[1]
    found = []
    for name, (x, d) in given.items():
        whole = name == "rows" and x is not None and d is None and x.dim() == 2
        if whole or name in ("q", "k", "first_keys") or KINDS.get(name) in (BATCH, TOKENS):
            found.append(None if x is None else _front(x, d, V).flatten(0, 1))
        elif KINDS.get(name) == MASK and d is not None:
            moved = x.movedim(d, 0)
            moved = moved.reshape(V, *(1,) * (5 - moved.dim()), *moved.shape[1:]).expand(V, B, -1, -1, -1)
            found.append(moved.flatten(0, 1))
        elif KINDS.get(name) == MASK and x is not None and x.dim() == 4 and len(x) > 1:
            found.append(_front(x, None, V).flatten(0, 1))
        elif d is not None:
            raise bad_value(name, "the same for all of vmap's calls", "mapped", "Call the operator in a loop instead")
        else:
            found.append(x)
    results = torch.ops.levelhead.observe(*found)
    return tuple(x.unflatten(0, (V, B)) for x in results), (0, 0)


def _front(x: Tensor, d: int | None, size: int) -> Tensor:
    return x.expand(size, *x.shape) if d is None else x.movedim(d, 0)


register_vmap("levelhead::observe", _mapped, lib=_library)
