"""Operators that may attend and cannot be followed: custom ones, and products inside a compiled function.

Nothing is known about what happens in them. Their shapes are those of attention, so they are named.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_OWN = ("aten", "prim", "prims", "inductor", "c10d", "_c10d_functional", "profiler", "rngprims", "quantized", "fsdp")
_SOUNDS = ("attn", "attention", "sdpa", "mha")
_FEWEST = 3  # axes of queries
_ROUNDED = 1e-2  # half types
_SAME_SIGNS = 0.95  # of a gate's results; a mean of values has the sign of its own token's less often
IN_FUNCTION = (
    "a product of a product of activations in a compiled function, which is not followed: there may be a softmax by "
    "hand between them; run it once without torch.compile"
)


def attends(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any, module: nn.Module) -> str | None:
    """The name of a custom operator with the shapes of attention: q, k, v, and a result like q; None: it is another.
    Where no axis of heads shows it and the name says nothing, the numbers must be those of a mean of values."""
    if _is_known(func):
        return None
    name = f"{func.namespace}::{func.overloadpacket.__name__}"
    sounds = any(word in name.lower() for word in _SOUNDS)
    given = [x for x in _tensors((*args, *kwargs.values())) if x.is_floating_point() and x.dim() >= _FEWEST]
    several = out if isinstance(out, list | tuple) else (out,)
    made = [x for x in several if isinstance(x, Tensor)] or given[3:4]  # written into an argument
    if not made:
        return None
    if len(given) < 3:
        return f"op {name}" if sounds and _is_packed(given, made[0]) else None
    q, k, v = given[:3]
    if not q.dim() == k.dim() == v.dim() == made[0].dim() or q.shape[-1] != k.shape[-1]:
        return None
    if q.shape[0] != k.shape[0] or k.shape[:-1] != v.shape[:-1] or k.shape in [x.shape for x in made[1:]]:
        return None
    if made[0].shape != (*q.shape[:-1], v.shape[-1]):
        return None
    return f"op {name}" if sounds or _may_attend(q, k, v, made[0], module) else None


@functools.lru_cache(maxsize=4096)
def _is_known(func: Any) -> bool:
    return func.namespace in _OWN or func.namespace.startswith("levelhead")


def _tensors(given: Iterable[Any]) -> Iterator[Tensor]:
    for x in given:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from _tensors(x)


def _is_packed(given: list[Tensor], out: Tensor) -> bool:
    """Whether these are queries, keys and values in one tensor, or keys and values in one."""
    return bool(given) and out.dim() >= _FEWEST and sum(x.numel() for x in given) == 3 * out.numel()


def _may_attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor, module: nn.Module) -> bool:
    if q.dim() == _FEWEST and any(q.shape[-1] in x.shape for x in module.parameters() if x.dim() == 2):
        return _is_mean(q, k, v, out)  # rows as wide as a layer may be a stream of tokens
    return max(k.shape[1:-1]) > 1 and not _is_rotation(k, v)


def _is_mean(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> bool:
    """Whether each number of a result (B, T, C) lies between those of the values at all tokens, or 0, and it is no
    function of its own token alone that keeps a sign, as a gate does."""
    mixed = [x.detach().float() for x in (q, k, v, out)]
    values, made = mixed[2], mixed[3]
    low, high = (f(1, keepdim=True) for f in (values.amin, values.amax))
    slack = _ROUNDED * values.abs().amax()
    inside = (made >= low.clamp(max=0.0) - slack) & (made <= high.clamp(min=0.0) + slack)
    like = [x for x in mixed[:3] if x.shape == made.shape]
    gated = any(float(((x < 0) == (made < 0)).float().mean()) > _SAME_SIGNS for x in like)
    return bool(inside.all()) and not gated and values.shape[1] > 1


def _is_rotation(cosine: Tensor, sine: Tensor) -> bool:
    """Whether these may be the angles of positions."""
    if cosine.shape != sine.shape:
        return False
    length = cosine.detach().float().square() + sine.detach().float().square()
    return bool(torch.allclose(length, length.flatten()[:1], rtol=0.02))


class CompiledProducts:
    """Finds a batched product of a batched product where compiled code writes into memory of its own."""

    def __init__(self) -> None:
        self._last: tuple[Any, torch.Size] | None = None  # the frame, and the shape of the product

    def is_second(self, frame: Any, func: Any, left: Tensor, out: Tensor) -> bool:
        """Whether this product of activations is of one before."""
        if func._overloadname != "out":
            return False
        last, self._last = self._last, (frame, out.shape)
        return last is not None and last[0] is frame and last[1] == left.shape
