"""The gradients of `attention`, for whoever differentiates by hand: checked, then left to the core.

The weights are not kept between forward and backward; they are recomputed from the logsumexp, so
memory stays at O(tokens · width). What it costs to ask for a mask's gradient is an array of the
mask's own shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from levelhead import _core, checks
from levelhead.attention import options_for_core, team_for
from levelhead.call import arrays, scoring
from levelhead.call.arrays import Array, Origin
from levelhead.errors import LevelheadTypeError, LevelheadValueError, expected

_NAMES = ("q", "k", "v", "mask", "sinks", "scale")


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    logsumexp: Any,
    *,
    dlogsumexp: Any = None,
    wrt: Sequence[str] = ("q", "k", "v"),
    scale: Any = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Any = None,
    softcap: float | None = None,
    sinks: Any = None,
    alibi: Any = None,
    key_lengths: Any = None,
    segments: Any = None,
    query_start: Any = None,
    dropout: float = 0.0,
    seed: int | None = None,
    threads: int | None = None,
) -> tuple[Any, ...]:
    """Gradients of a loss by the arguments of `attention`, given its gradient by the output.

    Args:
        dout: dL/d(output), of the output's shape, dtype and family.
        q, k, v: as they were given to `attention` or `observe`; so all options below.
        out: the output.
        logsumexp: (..., H, T), `observe(...).logsumexp`.
        dlogsumexp: dL/d(logsumexp), of the same shape; None where the loss does not use it.
        wrt: whose gradients, out of "q", "k", "v", "mask" (an additive one), "sinks", "scale".

    Returns:
        A tuple in the order of `wrt`: of the shape, dtype and family of what they are gradients
        of. Those of the mask, the sinks and the scale are float32 (float64 for float64), summed
        over the dimensions along which they were broadcast; of the scale one number, or one per
        head where it was given so.

    >>> q = np.ones((2, 3, 4), np.float32)
    >>> seen = levelhead.observe(q, q, q)
    >>> dq, dk = attention_backward(q, q, q, q, seen.output, seen.logsumexp, wrt=("q", "k"))
    >>> dk.shape
    (2, 3, 4)
    """
    wanted = _names(wrt, mask, sinks)
    q, k, v, origin = arrays.take(q, k, v)
    shape = scoring.shape_of(q.shape, k.shape, v.shape)
    rows, result = q.shape[:-1], (*q.shape[:-1], v.shape[-1])
    given = {name: arrays.alike(name, x, origin) for name, x in (("dout", dout), ("out", out))}
    for name, x in given.items():
        _same_shape(name, x.shape, result, "It has the shape of the output")
    lse = _per_row("logsumexp", logsumexp, rows, origin)
    dlse = None if dlogsumexp is None else _per_row("dlogsumexp", dlogsumexp, rows, origin)
    if dropout and seed is None:
        what, advice = "the seed of the forward pass", "Give both calls the same seed"
        raise LevelheadValueError(expected("seed", what, "None", advice))
    options = options_for_core(
        shape,
        origin,
        scale=scale,
        causal=causal,
        window=window,
        mask=mask,
        softcap=softcap,
        sinks=sinks,
        alibi=alibi,
        key_lengths=key_lengths,
        segments=segments,
        query_start=query_start,
        dropout=dropout,
        seed=seed,
    )
    room = {name: _room(name, {"q": q, "k": k, "v": v}, mask, shape.H, origin) for name in wanted}
    into: dict[str, Any] = {f"d{name}": x for name, x in room.items()}
    if "mask" in room:
        into["dmask"] = _stretched(room["mask"], options["mask"].shape)
    team = team_for(threads, origin)
    _core.backward(given["dout"], q, k, v, given["out"], lse, dlogsumexp=dlse, **into, **team, **options)
    if "scale" in room and np.ndim(scale) == 0:
        room["scale"] = room["scale"].sum(keepdims=True).reshape(())
    for name in {"sinks", "scale"} & room.keys():
        room[name] = room[name].astype(origin.wide)
    return tuple(origin.give(room[name]) for name in wrt)


def _names(wrt: Sequence[str], mask: Any, sinks: Any) -> list[str]:
    """The names in `wrt`, each known, given once and possible."""
    what, advice = f"names out of {', '.join(_NAMES)}", 'Pass for example wrt=("q", "k", "v")'
    if isinstance(wrt, str) or not all(isinstance(name, str) for name in wrt):
        raise LevelheadTypeError(expected("wrt", f"a sequence of {what}", checks.told(wrt), advice))
    if not set(wrt) <= set(_NAMES) or len(set(wrt)) < len(wrt):
        raise LevelheadValueError(expected("wrt", f"different {what}", tuple(wrt), advice))
    for name, x in (("mask", mask), ("sinks", sinks)):
        if name in wrt and x is None:
            raise LevelheadValueError(expected("wrt", "what was given", f"{name!r} without {name}", f"Give {name}"))
    if "mask" in wrt and _is_boolean(mask):
        raise LevelheadTypeError(
            expected("wrt", "an additive mask", "a boolean one", "Only a float mask has a gradient")
        )
    return list(wrt)


def _is_boolean(mask: Any) -> bool:
    return "bool" in str(getattr(mask, "dtype", ""))


def _same_shape(name: str, given: tuple[int, ...], wanted: tuple[int, ...], advice: str) -> None:
    if given != wanted:
        raise LevelheadValueError(expected(name, f"shape {wanted}", f"shape {given}", advice))


def _per_row(name: str, x: Any, rows: tuple[int, ...], origin: Origin) -> Array:
    """One number per query row, as the core reads it."""
    view = arrays.option(name, x)
    what, advice = f"an array of floats of shape {rows}", "Use observe(...).logsumexp"
    if not isinstance(view, np.ndarray) or view.dtype.kind != "f":
        raise LevelheadTypeError(expected(name, what, checks.told(x), advice))
    _same_shape(name, view.shape, rows, advice)
    return np.ascontiguousarray(view, origin.wide)


def _room(name: str, qkv: dict[str, Array], mask: Any, H: int, origin: Origin) -> Array:
    """Memory for a gradient; sums over rows and heads are kept in double by the core."""
    if name in qkv:
        return np.empty(qkv[name].shape, origin.storage)
    if name == "mask":
        return np.zeros(tuple(mask.shape), origin.wide)
    return np.empty(H, np.float64)


def _stretched(x: Array, shape: tuple[int, ...]) -> Array:
    """x seen as an array of that shape, writable: elements of a broadcast axis are one."""
    x = x.reshape(x.shape[-len(shape) :])  # q of rank 2 is one head without its axis
    seen = np.broadcast_to(x, shape)
    return np.lib.stride_tricks.as_strided(x, shape, seen.strides)
