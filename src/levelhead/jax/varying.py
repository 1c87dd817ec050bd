"""Over which axes of a mesh values vary, inside `shard_map`.

JAX keeps count of it for its own operations; a custom call and the start of a scan must do so for themselves. Outside
of shard_map all of this is nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec


def axes_of(arrays: Any) -> frozenset[str]:
    """The axes over which any of the arrays varies."""
    mats = (jax.typeof(x).mat.varying for x in jax.tree.leaves(arrays))
    return frozenset().union(*mats)


def result_types(results: Collection[tuple[tuple[int, ...], Any]], operands: Any) -> tuple[Any, ...]:
    """Of a custom call with these operands, from shapes and dtypes."""
    axes = axes_of(operands)
    if not axes:
        return tuple(jax.ShapeDtypeStruct(*result) for result in results)
    mesh = jax.typeof(jax.tree.leaves(operands)[0]).sharding.mesh
    mat = jax.sharding.ManualAxisType(varying=axes)
    whole = (
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*(None,) * len(shape))) for shape, _ in results
    )
    pairs = zip(results, whole, strict=True)
    return tuple(jax.ShapeDtypeStruct(*result, sharding=at, manual_axis_type=mat) for result, at in pairs)


def as_varying(tree: Any, axes: frozenset[str]) -> Any:
    """The same arrays, varying over at least these axes."""

    def cast(x: Any) -> Any:
        missing = tuple(sorted(axes - axes_of(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def with_auto_axes(function: Callable[[Any], Any], arrays: Any, like: Any, results: Mapping[str, Any]) -> Any:
    """`function(arrays)` where JAX propagates shardings itself, also on a mesh whose axes are explicit.

    `results` says which axes of `like` the first ones of each result are spread as, and the number of further ones.
    """
    meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays))
    mesh = next((mesh for mesh in meshes if mesh.explicit_axes), None)
    if mesh is None:
        return function(arrays)
    spec = (*jax.typeof(like).sharding.spec, *(None,) * like.ndim)
    shardings = {
        name: NamedSharding(mesh, PartitionSpec(*(spec[axis] for axis in axes), *(None,) * more))
        for name, (axes, more) in results.items()
    }
    return jax.sharding.auto_axes(function, out_sharding=shardings)(arrays)
