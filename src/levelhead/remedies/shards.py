"""Parameters that ranks hold in parts (DTensor: FSDP2, tensor parallelism): which rows of the whole are here.

A clip writes into the part of this rank, and no part travels. Rows are numbers along one dimension of the whole
parameter. FSDP2 puts whole copies in the place of its parts while a model runs; what is written into a copy is lost, so
`resharded` puts the parts back first. FSDP1, whose parts are flat pieces of many parameters, is refused elsewhere.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor, nn

_SAMPLED = 64  # numbers of a parameter that its fingerprint reads


def is_sharded(x: Any) -> bool:
    """Whether a tensor is a DTensor, of which this rank has a part."""
    return hasattr(x, "to_local") and hasattr(x, "placements") and hasattr(x, "device_mesh")


def local(x: Tensor) -> Tensor:
    """The part of this rank; it shares its memory with the parameter."""
    part: Tensor = x.to_local() if is_sharded(x) else x  # type: ignore[attr-defined]
    return part


def rows_here(x: Tensor, dim: int) -> Tensor:
    """Numbers of the rows along `dim` of the whole parameter that this rank has, in order."""
    rows = torch.arange(x.shape[dim])
    if not is_sharded(x):
        return rows
    mesh: Any = x.device_mesh  # type: ignore[attr-defined]
    coordinate = mesh.get_coordinate() or []
    placements = list(enumerate(x.placements))  # type: ignore[attr-defined]
    # FSDP2 over tensor parallelism cuts what that has cut before, although its dimension of the mesh comes first.
    later = [(n, one) for n, one in placements if hasattr(one, "split_factor")]
    for n, placement in [each for each in placements if each not in later] + later:
        if getattr(placement, "dim", None) == dim % x.dim():
            pieces = rows.chunk(mesh.size(n))
            rows = pieces[coordinate[n]] if coordinate[n] < len(pieces) else rows[:0]
    return rows


def holders(x: Tensor) -> tuple[int, ...]:
    """The ranks that hold one parameter together; empty: this one holds all of it."""
    if not is_sharded(x):
        return ()
    return tuple(x.device_mesh.mesh.flatten().tolist())  # type: ignore[attr-defined]


def resharded(model: nn.Module) -> None:
    """Puts the parts of FSDP2 back, where whole copies are in their place."""
    for module in model.modules():
        if hasattr(module, "_get_fsdp_state"):
            sharded: Any = module
            sharded.reshard()


def whole_copies(model: nn.Module) -> dict[int, Tensor]:
    """The whole copies that FSDP2 puts in the place of its parts, by the identity of the parameter in parts."""
    found: dict[int, Tensor] = {}
    for module in model.modules():
        if hasattr(module, "_get_fsdp_state"):
            sharded: Any = module
            state = sharded._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # older versions of torch have one
            groups = [getattr(state, "_fsdp_param_group", None)] if groups is None else groups
            for each in (x for group in groups for x in getattr(group, "fsdp_params", ())):
                if hasattr(each, "_unsharded_param"):  # it was made for a pass
                    found[id(each.sharded_param)] = each.unsharded_param
    return found


def fingerprint(parameters: list[Tensor]) -> int:
    """A number of this rank's parts: the same bits have the same, other bits have another."""
    found = 0
    for parameter in parameters:
        flat = local(parameter.detach()).flatten()
        step = max(1, len(flat) // _SAMPLED)
        found = zlib.crc32(flat[::step][: 2 * _SAMPLED].double().cpu().numpy().tobytes(), found)
    return found
