"""The gradients of `attention`, for callers that differentiate by hand: checked, then computed by the core.

The weights are not kept between forward and backward; they are recomputed from the logsumexp, so memory stays at
O(tokens · width), and an array of the mask's shape for a mask's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from levelhead import _core, checks
from levelhead.call import arrays
from levelhead.call.arrays import Array, Origin
from levelhead.call.halves import as_float32
from levelhead.call.options import Options, documented, known, shape_of
from levelhead.call.prepare import described, for_core, team_for
from levelhead.errors import bad_type, bad_value
from levelhead.observation import ArrayT, Unpack

_NAMES = ("q", "k", "v", "mask", "sinks", "scale")


@documented()
def attention_backward(
    dout: ArrayT,
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    out: ArrayT,
    logsumexp: Any,
    *,
    dlogsumexp: Any = None,
    wrt: Sequence[str] = ("q", "k", "v"),
    threads: int | None = None,
    **options: Unpack[Options],
) -> tuple[ArrayT, ...]:
    """Gradients of a loss by the arguments of `attention`, given its gradient by the output.

    Args:
        dout: dL/d(output), of the output's shape, dtype and family.
        q, k, v: as they were given to `attention` or `observe`; so are the options.
        out: the output.
        logsumexp: (..., H, T), `observe(...).logsumexp`.
        dlogsumexp: dL/d(logsumexp), of the same shape; None where the loss does not use it.
        wrt: whose gradients, out of "q", "k", "v", "mask" (an additive one), "sinks", "scale".
        {options}

    Returns:
        A tuple in the order of `wrt`: of the shape, dtype and family of what they are gradients of. Those of the mask,
        the sinks and the scale are float32 (float64 for float64), summed over the dimensions along which they were
        broadcast; of the scale one number, or one per head where it was given so.

    >>> q = np.ones((2, 3, 4), np.float32)
    >>> seen = levelhead.observe(q, q, q)
    >>> dq, dk = attention_backward(q, q, q, q, seen.output, seen.logsumexp, wrt=("q", "k"))
    >>> dk.shape
    (2, 3, 4)
    """
    known("attention_backward", options)
    mask, scale = options.get("mask"), options.get("scale")
    _check_names(wrt, mask, options.get("sinks"))
    q_view, k_view, v_view, origin = arrays.take(q, k, v)
    shape = shape_of(q_view.shape, k_view.shape, v_view.shape)
    rows, result = q_view.shape[:-1], (*q_view.shape[:-1], v_view.shape[-1])
    outputs = {name: arrays.alike(name, x, origin) for name, x in (("dout", dout), ("out", out))}
    for name, x in outputs.items():
        _same_shape(name, x.shape, result, "It has the shape of the output")
    lse = _per_row("logsumexp", logsumexp, rows, origin)
    dlse = None if dlogsumexp is None else _per_row("dlogsumexp", dlogsumexp, rows, origin)
    if options.get("dropout") and options.get("seed") is None:
        raise bad_value("seed", "the seed of the forward pass", "None", "Give both calls the same seed")
    keywords = for_core(described(shape, origin, options), shape)
    qkv = {"q": q_view, "k": k_view, "v": v_view}
    room = {name: _room(name, qkv, mask, shape.H, origin) for name in wrt}
    into: dict[str, Any] = {f"d{name}": x for name, x in room.items()}
    if "mask" in room:
        into["dmask"] = arrays.stretched(room["mask"], keywords["mask"].shape)
    keywords |= team_for(threads, origin)
    if "mask" in room and origin.dtype in ("float16", "bfloat16"):
        outputs["out"] = unrounded(q_view, k_view, v_view, arrays.take_mask(mask, origin), keywords)
    _core.backward(outputs["dout"], q_view, k_view, v_view, outputs["out"], lse, dlogsumexp=dlse, **into, **keywords)
    if "scale" in room and np.ndim(cast(Any, scale)) == 0:
        room["scale"] = room["scale"].sum(keepdims=True).reshape(())
    for name in {"sinks", "scale"} & room.keys():
        room[name] = room[name].astype(origin.wide)
    return tuple(origin.give(room[name]) for name in wrt)


def unrounded(q: Array, k: Array, v: Array, mask: Any, keywords: dict[str, Any]) -> Array:
    """The output in float32. Each gradient of a logit has dout·out subtracted; a mask's gradient is a sum of many, in
    which the rounding of a half type would add up instead of cancelling. `mask` is the one before it was broadcast."""
    q, k, v, mask = (as_float32(x) for x in (q, k, v, mask))
    out = np.empty((*q.shape[:-1], v.shape[-1]), np.float32)
    _core.forward(q, k, v, out=out, **keywords | {"mask": arrays.stretched(mask, keywords["mask"].shape)})
    return out


def _check_names(wrt: Sequence[str], mask: Any, sinks: Any) -> None:
    """The names in `wrt` are known, given once and possible."""
    what, advice = f"names out of {', '.join(_NAMES)}", 'Pass for example wrt=("q", "k", "v")'
    if isinstance(wrt, str) or not all(isinstance(name, str) for name in wrt):
        raise bad_type("wrt", f"a sequence of {what}", checks.short_repr(wrt), advice)
    if not set(wrt) <= set(_NAMES) or len(set(wrt)) < len(wrt):
        raise bad_value("wrt", f"different {what}", tuple(wrt), advice)
    for name, x in (("mask", mask), ("sinks", sinks)):
        if name in wrt and x is None:
            raise bad_value("wrt", "what was given", f"{name!r} without {name}", f"Give {name}")
    if "mask" in wrt and "bool" in str(getattr(mask, "dtype", "")):
        raise bad_type("wrt", "an additive mask", "a boolean one", "Only a float mask has a gradient")


def _same_shape(name: str, given: tuple[int, ...], wanted: tuple[int, ...], advice: str) -> None:
    if given != wanted:
        raise bad_value(name, f"shape {wanted}", f"shape {given}", advice)


def _per_row(name: str, x: Any, rows: tuple[int, ...], origin: Origin) -> Array:
    """One number per query row, as the core reads it."""
    view = arrays.option(name, x)
    what, advice = f"an array of floats of shape {rows}", "Use observe(...).logsumexp"
    if not isinstance(view, np.ndarray) or view.dtype.kind != "f":
        raise bad_type(name, what, checks.short_repr(x), advice)
    _same_shape(name, view.shape, rows, advice)
    return np.ascontiguousarray(view, origin.wide)


def _room(name: str, qkv: dict[str, Array], mask: Any, H: int, origin: Origin) -> Array:
    """Memory for a gradient; sums over rows and heads are kept in double by the core."""
    if name == "mask":
        return np.zeros(tuple(mask.shape), origin.wide)
    return np.empty(qkv[name].shape, origin.storage) if name in qkv else np.zeros(H)
