"""Operators that may attend and cannot be followed: custom ones, and products inside a compiled function.

Nothing is known about what happens in them. Their shapes are those of attention, so they are named.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_OWN = ("aten", "prim", "prims", "inductor", "c10d", "_c10d_functional", "profiler", "rngprims", "quantized", "fsdp")
_SOUNDS = ("attn", "attention", "sdpa", "mha")
IN_FUNCTION = (
    "a product of a product of activations in a compiled function, which is not followed: there may be a softmax by "
    "hand between them; run it once without torch.compile"
)


def attends(func: Any, args: tuple[Any, ...], out: Any, module: nn.Module) -> str | None:
    """The name of a custom operator with the shapes of attention: q, k, v with heads, and a result like q; None: it is
    another. Without an axis of heads, rows as wide as a layer of the module are more likely a stream of tokens."""
    if func.namespace in _OWN or func.namespace.startswith("levelhead"):
        return None
    given = [x for x in args if isinstance(x, Tensor) and x.is_floating_point()]
    if len(given) < 3 or min(x.dim() for x in given[:3]) < 3:
        return None
    q, k, v = given[:3]
    several = out if isinstance(out, list | tuple) else (out,)
    made = [x.shape for x in several if isinstance(x, Tensor)]
    made = made or [x.shape for x in given[3:4]]  # written into an argument
    if not q.dim() == k.dim() == v.dim() or not q.shape[-1] == k.shape[-1] == v.shape[-1]:
        return None
    if q.shape[0] != k.shape[0] or k.shape != v.shape or not made or made[0] != q.shape or k.shape in made[1:]:
        return None
    name = f"{func.namespace}::{func.overloadpacket.__name__}"
    if not any(word in name for word in _SOUNDS):
        if q.dim() == 3 and any(q.shape[-1] in x.shape for x in module.parameters() if x.dim() == 2):
            return None
        if max(k.shape[1:-1]) == 1 or _is_rotation(k, v):
            return None
    return f"op {name}"


def _is_rotation(cosine: Tensor, sine: Tensor) -> bool:
    """Whether these may be the angles of positions."""
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
