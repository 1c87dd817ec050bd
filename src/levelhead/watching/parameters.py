"""Which tensors are parameters of a model, or nothing but parameters in another form, or computed from nothing else.

A weight may reach its product transposed, cast (autocast), normalised, or as a view of a flat parameter. A product of
two parameters is no parameter: learned queries go through a projection like any others.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from levelhead.watching.tensor_table import TensorTable

_PRODUCTS = ("bmm", "mm", "mv", "baddbmm", "addmm", "embedding", "index", "index_select")
_CAST_NAMES = "ToCopy T View Transpose AsStrided Split SplitWithSizes Permute Alias Slice"
_CASTS = tuple(f"{name}Backward" for name in _CAST_NAMES.split())


class Parameters:
    """The parameters of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._made: TensorTable[Any] = TensorTable()  # tensors made of parameters only
        self._learned: TensorTable[bool] = TensorTable()  # those that went through a product, too, and counted places
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
        if not inputs and name != "arange":
            return
        known = [self.of(x) for x in inputs]
        whole = inputs and isinstance(out, Tensor) and name not in _PRODUCTS and out.is_floating_point()
        if whole and None not in known:
            self._made[out] = known[0]
            return
        learned = all(form is not None or x in self._learned for form, x in zip(known, inputs, strict=True))
        for x in out if isinstance(out, list | tuple) else (out,):
            if learned and isinstance(x, Tensor):
                self._learned[x] = True
            elif x in self._learned:  # overwritten
                self._learned.drop(x)

    def learned(self, x: Tensor) -> bool:
        """Whether x is computed from parameters alone, as expert embeddings behind a projection are."""
        return x in self._learned or self.of(x) is not None


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
