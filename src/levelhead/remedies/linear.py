"""Whether a projection is its weight times its input, so that scaled rows of the weight are scaled outputs.

Hooks, adapters (LoRA) and quantised layers may add something that does not scale. Some tokens are computed again from
the weight. An adapter that adds nothing yet, as it begins, is known by its structure.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from levelhead.remedies import shards

_TOKENS, _OUTPUTS = 8, 64  # compared at most
_SAME = {torch.float64: 1e-6, torch.float32: 5e-3}  # of the largest output; matrix units round inputs to TF32
_SAME_HALF = 5e-2
_WORDS = ("lora", "adapter", "dora")


def rows_of_outputs(module: nn.Module, dim: int, features: int) -> Tensor | None:
    """The number of the weight's row behind every output of this rank; None: not known."""
    weight = module._parameters["weight"]
    assert weight is not None
    if features == weight.shape[dim]:
        return torch.arange(features)
    rows = shards.rows_here(weight, dim)
    return rows if len(rows) == features else None


def is_linear(module: nn.Module, dim: int, rows: Tensor, x: Tensor, out: Tensor, columns: Tensor) -> bool:
    """Whether out is x times the weight, plus the bias, at some tokens and some of these columns."""
    weight, bias = module._parameters["weight"], module._parameters.get("bias")
    assert weight is not None
    x, out = shards.local(x), shards.local(out)
    here = {row: place for place, row in enumerate(shards.rows_here(weight, dim).tolist())}
    flat = columns.flatten()
    chosen = [c for c in flat[:: max(1, len(flat) // _OUTPUTS)].tolist() if int(rows[c]) in here]
    part = shards.local(weight.detach())
    if not chosen or part.shape[1 - dim] != x.shape[-1]:
        return True  # an input over ranks is not computed again
    places = torch.tensor([here[int(rows[c])] for c in chosen], device=part.device)
    given, found = x.reshape(-1, x.shape[-1])[:_TOKENS], out.reshape(-1, out.shape[-1])[:_TOKENS]
    if len(given) != len(found):
        return False
    exact = torch.float32 if x.device.type == "mps" else torch.float64
    matrix = part.index_select(dim, places).to(exact)
    wanted = given.to(exact) @ (matrix.T if dim == 0 else matrix)
    if bias is not None:
        held = {row: place for place, row in enumerate(shards.rows_here(bias, 0).tolist())}
        if all(int(rows[c]) in held for c in chosen):
            where = torch.tensor([held[int(rows[c])] for c in chosen], device=part.device)
            wanted = wanted + shards.local(bias.detach())[where].to(exact)
        else:
            return True
    value = found[:, torch.tensor(chosen, device=out.device)].to(exact)
    limit = _SAME.get(out.dtype, _SAME_HALF) * float(wanted.abs().max())
    return bool((value - wanted).abs().max() <= limit)


def adapter(projection: nn.Module, attention: nn.Module) -> str | None:
    """Why a projection's output may get an addition that its weight does not know; None: nothing says so."""
    own = [name for name, x in projection.named_parameters() if name not in ("weight", "bias") and x is not None]
    if own:
        return f"the projection holds {', '.join(own[:3])} beside its weight"
    for name, around in attention.named_modules():
        if around is attention or projection not in set(around.modules()) or around is projection:
            continue
        names = [each for each, _ in around.named_modules()] + list(dict(around.named_parameters()))
        if any(word in each.lower() for each in names for word in _WORDS) or _low_rank(around, projection):
            return f"{name} adds to its projection (an adapter)"
    return None


def _low_rank(around: nn.Module, projection: nn.Module) -> bool:
    """Whether a pair of narrow layers reads what the projection reads and puts out what it puts out."""
    layers = [x for x in around.modules() if isinstance(x, nn.Linear) and x is not projection]
    if not isinstance(projection, nn.Linear):
        return False
    reads, out = projection.in_features, projection.out_features
    return any(
        a.in_features == reads and b.out_features == out and a.out_features == b.in_features < min(reads, out)
        for a in layers
        for b in layers
    )
