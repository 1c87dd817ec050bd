"""Additive attention (Bahdanau, Cho, Bengio 2014): softmax(w_v · tanh(W_q q + W_k k)) v.

Queries and keys are projected once, then streamed through the core's tiles, so that the (T, S, A) array of the plain
formulation never exists.
"""

from __future__ import annotations

import sys
from typing import Any, TypeAlias, cast

import numpy as np

from levelhead import _core, front_ends
from levelhead.call import arrays
from levelhead.call.arrays import Array, Origin
from levelhead.call.options import ADDITIVE, AdditiveOptions, documented, known, shape_of
from levelhead.call.prepare import described, for_core, team_for
from levelhead.errors import bad_type, bad_value
from levelhead.observation import ArrayT, Unpack

Sizes: TypeAlias = tuple[int, ...]

# The core computes tanh(x + y) from 2^(q + k): projected queries and keys come times this.
OCTAVES = 2 / np.log(2)


@documented(ADDITIVE)
def additive_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    w_q: ArrayT,
    w_k: ArrayT,
    w_v: ArrayT,
    *,
    threads: int | None = None,
    **options: Unpack[AdditiveOptions],
) -> ArrayT:
    """softmax(s) v with s_ij = w_v · tanh(w_q q_i + w_k k_j). Query i is at position p = S - T + i.

    Args:
        q: queries (..., H, T, D), or (T, D).
        k: keys (..., H, S, Dk).
        v: values (..., H, S, E).
        w_q: (A, D), as `Linear.weight`; w_k: (A, Dk); w_v: (A,).
        {options}
        threads: as in `attention`.

    Returns:
        (..., H, T, E) in q's dtype and family; differentiable where it is torch's.

    >>> x, w = np.ones((3, 4), np.float32), np.ones((5, 4), np.float32)
    >>> additive_attention(x, x, x, w, w, np.ones(5, np.float32)).shape
    (3, 4)
    """
    known("additive_attention", options, ADDITIVE)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(q, torch.Tensor):
        serving = front_ends.serving("torch", "additive")
        return cast(ArrayT, serving.additive_attention(q, k, v, w_q, w_k, w_v, options, threads=threads))
    q_view, k_view, v_view, origin = arrays.take(q, k, v)
    weights = [arrays.alike(n, x, origin) for n, x in (("w_q", w_q), ("w_k", w_k), ("w_v", w_v))]
    check_weights(q_view.shape, k_view.shape, *(x.shape for x in weights))
    if origin.dtype == "bfloat16":
        raise bad_type("q", "a dtype NumPy multiplies", "bfloat16", "Use float32, float16 or float64")
    wide_q, wide_k, wide_v, *weights = (x.astype(origin.wide, copy=False) for x in (q_view, k_view, v_view, *weights))
    octaves = origin.wide.type(OCTAVES)
    projected_q, projected_k = wide_q @ weights[0].T * octaves, wide_k @ weights[1].T * octaves
    keywords = keywords_of(projected_q, projected_k, v_view, origin, options) | team_for(threads, origin)
    out = np.empty((*q_view.shape[:-1], v_view.shape[-1]), origin.wide)
    additive = np.ascontiguousarray(weights[2])
    _core.forward(projected_q, projected_k, wide_v, out=out, additive=additive, **keywords)
    return cast(ArrayT, origin.give(out.astype(origin.storage, copy=False)))


def keywords_of(q: Array, k: Array, v: Array, origin: Origin, options: AdditiveOptions) -> dict[str, Any]:
    """The core's keywords; additive scores are not scaled."""
    shape = shape_of(q.shape, k.shape, v.shape)
    return for_core(described(shape, origin, {**options, "scale": 1.0}), shape)


def check_weights(q: Sizes, k: Sizes, w_q: Sizes, w_k: Sizes, w_v: Sizes) -> None:
    """The shapes of the three weights fit each other, and the queries and keys."""
    advice = "w_q is (A, D), w_k (A, Dk), w_v (A,)"
    if len(w_v) != 1:
        raise bad_value("w_v", "one dimension", f"shape {w_v}", advice)
    for name, shape, width in (("w_q", w_q, q[-1]), ("w_k", w_k, k[-1])):
        if shape != (w_v[0], width):
            raise bad_value(name, f"shape {(w_v[0], width)}", f"shape {shape}", advice)
