"""Projections without a layer: weights that a module holds itself and multiplies with its input.

No hook sees such a product, so it is computed once more, at the sampled tokens only: every weight with every input of
its width. A product that the model did not form matches no query or key, and does no harm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from levelhead.watching.effective_scale import Ran, is_by_definition

_MOST = 16  # weights of a module that are tried
_INPUTS = 6


def own_weights(module: nn.Module) -> tuple[str, ...]:
    """Names of parameters of a module that may be projections; none if it is a layer that has one weight."""
    names = [name for name, p in module._parameters.items() if p is not None and 2 <= p.dim() <= 4]
    return () if names == ["weight"] or is_by_definition(module) else tuple(names[:_MOST])


def products(module: nn.Module, names: Sequence[str], inputs: Sequence[Ran]) -> Iterator[Ran]:
    """Inputs times weights, at the sampled tokens."""
    seen = list({one.rows.data_ptr(): one for one in inputs}.values())[-_INPUTS:]
    with torch.no_grad():
        for name in names:
            weight = module._parameters.get(name)
            if weight is None:
                continue
            biases = [p for p in module._parameters.values() if p is not None and p is not weight]
            for x in seen:
                for out in _turned(weight.detach(), x.rows):
                    yield Ran(name, None, x.rows.shape[1], x.tokens, out)
                    for bias in biases:
                        if bias.numel() == out.shape[1]:
                            yield Ran(name, None, x.rows.shape[1], x.tokens, out + bias.detach().reshape(-1).to(out))


def _turned(weight: Tensor, x: Tensor) -> Iterator[Tensor]:
    """x (n, width) times a weight that has this width as its first, last or middle dimension."""
    width, same = x.shape[1], weight.to(x.dtype)
    for dim in range(weight.dim()):
        if weight.shape[dim] == width and weight.numel() <= 1 << 28:
            yield x @ same.movedim(dim, 0).reshape(width, -1)
