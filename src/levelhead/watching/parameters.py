"""Which tensors are parameters of a model, or nothing but parameters in another form.

A weight may reach its product transposed, cast (autocast), normalised, or as a view of a flat parameter. A product of
two parameters is no parameter: learned queries go through a projection like any others.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

_PRODUCTS = ("bmm", "mm", "mv", "baddbmm", "addmm", "embedding", "index", "index_select")
_CAST_NAMES = "ToCopy T View Transpose AsStrided Split SplitWithSizes Permute Alias Slice"
_CASTS = tuple(f"{name}Backward" for name in _CAST_NAMES.split())


class Parameters:
    """The parameters of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._made: Any = WeakIdKeyDictionary()  # tensors made of parameters only
        self._stored: dict[int, tuple[str, nn.Module]] = {}
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if (pointer := _pointer(parameter)) is not None:
                    self._stored[pointer] = (name.rsplit(".", 1)[-1], module)

    def of(self, x: Tensor) -> tuple[str, nn.Module | None] | None:
        """The name of the parameter that x is, and its module; None: x is an activation."""
        made: tuple[str, nn.Module | None] | None = self._made.get(x)
        if made is not None:
            return made
        pointer = _pointer(x)
        if pointer is not None and pointer in self._stored:
            return self._stored[pointer]
        return ("", None) if isinstance(x, nn.Parameter) or _is_cast(x) else None

    def pass_on(self, name: str, inputs: list[Tensor], out: Any) -> None:
        """Stores what is made of parameters only."""
        if inputs and isinstance(out, Tensor) and name not in _PRODUCTS and out.is_floating_point():
            known = [self.of(x) for x in inputs]
            if all(x is not None for x in known):
                self._made[out] = known[0]


def _pointer(x: Tensor) -> int | None:
    try:
        return x.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):  # without a storage
        return None


def _is_cast(x: Tensor) -> bool:
    """Whether autograd knows it as another form of a leaf: a cast that autocast kept, a view of a flat parameter."""
    node = x.grad_fn
    for _ in range(6):
        if node is None or not node.name().startswith(_CASTS):
            break
        node = node.next_functions[0][0]
    else:
        return False
    variable = getattr(node, "variable", None)  # of AccumulateGrad
    return isinstance(variable, nn.Parameter) and x.grad_fn is not None
