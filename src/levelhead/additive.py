"""Additive attention (Bahdanau, Cho, Bengio 2014): softmax(w_v · tanh(W_q q + W_k k)) v.

The rival that dot products replaced, done as well as they are: projected once, then streamed
through the core's tiles, so that the (T, S, A) array of the plain formulation never exists.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from levelhead import _core, front_ends
from levelhead.call import arrays
from levelhead.call.arrays import Array, Origin
from levelhead.call.options import ADDITIVE, Options, documented, known, shape_of
from levelhead.call.prepare import described, for_core, team_for
from levelhead.errors import bad_type, bad_value
from levelhead.observation import ArrayT

if TYPE_CHECKING:
    from typing_extensions import Unpack

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
    **options: Unpack[Options],
) -> ArrayT:
    """softmax(s) v with s_ij = w_v · tanh(w_q q_i + w_k k_j).

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
    seen_q, seen_k, seen_v, origin = arrays.take(q, k, v)
    weights = [arrays.alike(n, x, origin) for n, x in (("w_q", w_q), ("w_k", w_k), ("w_v", w_v))]
    check_weights(seen_q.shape, seen_k.shape, *(x.shape for x in weights))
    if origin.dtype == "bfloat16":
        raise bad_type("q", "a dtype NumPy multiplies", "bfloat16", "Use float32, float16 or float64")
    wide_q, wide_k, wide_v = (x.astype(origin.wide, copy=False) for x in weights)
    octaves = origin.wide.type(OCTAVES)
    projected_q = seen_q.astype(origin.wide, copy=False) @ wide_q.T * octaves
    projected_k = seen_k.astype(origin.wide, copy=False) @ wide_k.T * octaves
    keywords = keywords_of(projected_q, projected_k, seen_v, origin, options)
    values = seen_v.astype(origin.wide, copy=False)
    out = np.empty((*seen_q.shape[:-1], seen_v.shape[-1]), origin.wide)
    _core.forward(
        projected_q,
        projected_k,
        values,
        out=out,
        additive=np.ascontiguousarray(wide_v),
        **team_for(threads, origin),
        **keywords,
    )
    return cast(ArrayT, origin.give(out.astype(origin.storage, copy=False)))


def keywords_of(q: Array, k: Array, v: Array, origin: Origin, options: Options) -> dict[str, Any]:
    """The core's keywords; additive scores are not scaled."""
    shape = shape_of(q.shape, k.shape, v.shape)
    return for_core(described(shape, origin, {**options, "scale": 1.0}), shape)


def check_weights(
    q: tuple[int, ...], k: tuple[int, ...], w_q: tuple[int, ...], w_k: tuple[int, ...], w_v: tuple[int, ...]
) -> None:
    """The three weights fit each other, and the queries and keys."""
    advice = "w_q is (A, D), w_k (A, Dk), w_v (A,)"
    if len(w_v) != 1:
        raise bad_value("w_v", "one dimension", f"shape {w_v}", advice)
    for name, shape, width in (("w_q", w_q, q[-1]), ("w_k", w_k, k[-1])):
        wanted = (w_v[0], width)
        if shape != wanted:
            raise bad_value(name, f"shape {wanted}", f"shape {shape}", advice)
