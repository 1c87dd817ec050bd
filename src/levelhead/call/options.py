"""User options to one checked, normalised `Scoring`: what happens to a logit, and who sees whom.

The order, everywhere in levelhead: dot product, scale, softcap, bias (float mask) and ALiBi, hide
(bool mask, causal, window, key lengths, segments), softmax with sinks. A logit of -inf is hidden,
whatever made it so. This file checks and normalises; it computes no logit and copies no mask.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead.call.scaling import Scale, ScaleLike, resolve
from levelhead.call.segments import alibi_slopes, segment_ids, segment_pair
from levelhead.call.shapes import Shape, shape_of
from levelhead.checks import as_array, broadcast, flag, integer, integers, number, per_head, told
from levelhead.errors import LevelheadTypeError, LevelheadValueError, expected

__all__ = ["Scoring", "Shape", "alibi_slopes", "describe", "segment_ids", "shape_of"]

# Positions stay this far from the ends of int64, so that p + T, p - left and p - j cannot wrap.
_FAR = 2**61
_TINY = float(np.finfo(np.float32).tiny)
_HUGE = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Scoring:
    """Every option of an attention call in one normal form; `None` means absent."""

    scale: Scale
    causal: bool
    left: int | None  # window: keys from p - left ...
    right: int | None  # ... to p + right
    mask: NDArray[Any] | None  # view, batch + (H, T, S): bool, float, or bfloat16 bits in uint16
    softcap: float | None
    sinks: NDArray[np.float64] | None  # (H,)
    alibi: NDArray[np.float64] | None  # (H,) slopes
    key_lengths: NDArray[np.int64] | None  # (B,)
    query_segments: NDArray[np.int64] | None  # (B, T)
    key_segments: NDArray[np.int64] | None  # (B, S)
    query_start: NDArray[np.int64]  # (B,)
    dropout: float
    seed: int


def describe(
    shape: Shape,
    *,
    scale: ScaleLike = None,
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
    dtype_name: str = "float32",
) -> Scoring:
    """Check every option against `shape` and bring it to its normal form.

    Args:
        shape: what `shape_of` says of q, k and v.
        dtype_name: the dtype of q; a float mask has this dtype or float32. With "bfloat16" a
            uint16 mask is read as bfloat16 bits, so integer masks are refused before this call.
    """
    left, right = _window(window)
    rate = _dropout(dropout)
    query_segments, key_segments = (None, None) if segments is None else segment_pair(segments, shape)
    # Half types compute in float32, where a larger number would become inf.
    reach = float(np.finfo(np.float64).max) if dtype_name == "float64" else _HUGE
    return Scoring(
        scale=_scale(scale, shape, reach),
        causal=flag("causal", causal),
        left=left,
        right=right,
        mask=None if mask is None else _mask(mask, shape, dtype_name),
        softcap=None if softcap is None else _softcap(softcap, reach),
        sinks=None if sinks is None else _sinks(sinks, shape, reach),
        alibi=_alibi(alibi, shape, reach),
        key_lengths=None if key_lengths is None else _key_lengths(key_lengths, shape),
        query_segments=query_segments,
        key_segments=key_segments,
        query_start=_query_start(query_start, shape),
        dropout=rate,
        seed=_seed(seed, rate),
    )


def _scale(scale: ScaleLike, shape: Shape, reach: float) -> Scale:
    result = resolve(scale, heads=shape.H, d_k=shape.D)
    _within("scale", result.factor, reach, "Scale q or k down instead")
    return result


def _window(window: Any) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    what, advice = "(left, right)", "Give how many keys to either side, None for no limit"
    if not isinstance(window, tuple | list):
        raise LevelheadTypeError(expected("window", what, told(window), advice))
    if len(window) != 2:
        raise LevelheadValueError(expected("window", what, told(window), advice))
    return _reach("window left", window[0]), _reach("window right", window[1])


def _reach(argument: str, value: Any) -> int | None:
    if value is None:
        return None
    what, advice = "None or an integer of at least 0", "Pass None for no limit"
    size = integer(argument, value, what, advice)
    if size < 0:
        raise LevelheadValueError(expected(argument, what, size, advice))
    # With positions within _FAR, a reach of 2·_FAR leaves nothing out.
    return size if size < 2 * _FAR else None


def _mask(mask: Any, shape: Shape, dtype_name: str) -> NDArray[Any]:
    wanted = f"a bool mask, or a float mask of dtype {dtype_name} or float32"
    advice = "Use bool (True = may attend), or cast an additive mask to q's dtype"
    array = as_array("mask", mask, wanted, advice)
    name = array.dtype.name
    if name == "uint16" and dtype_name == "bfloat16":
        name = "bfloat16"
    floats = name in ("float16", "bfloat16", "float32", "float64")
    if not array.dtype.isnative or (name != "bool" and not floats):
        raise LevelheadTypeError(expected("mask", wanted, f"dtype {array.dtype}", advice))
    if floats and name not in (dtype_name, "float32"):
        raise LevelheadTypeError(expected("mask", wanted, f"dtype {name}", advice))
    if name == "bfloat16":
        array = array.view(np.uint16)
    full = (*shape.batch, shape.H, shape.T, shape.S)
    advice = "Its axes, from the last, are keys, queries, heads, batch; each full or of size 1"
    return broadcast("mask", array, full, "a mask", advice)


def _softcap(softcap: Any, reach: float) -> float:
    what, advice = "a finite number above 0", "Pass None for no cap"
    cap = number("softcap", softcap, what, advice)
    if cap <= 0:
        raise LevelheadValueError(expected("softcap", what, cap, advice))
    if reach == _HUGE and not _TINY <= cap <= _HUGE:
        what = f"a number between {_TINY:.3g} and {_HUGE:.3g}"
        raise LevelheadValueError(expected("softcap", what, cap, "Half types compute in float32"))
    return cap


def _sinks(sinks: Any, shape: Shape, reach: float) -> NDArray[np.float64]:
    what, advice = "one logit per query head", "Use -inf for a head without a sink"
    values = per_head("sinks", sinks, shape.H, what, advice)
    bad = values[np.isnan(values) | (values == np.inf)]
    if bad.size:
        raise LevelheadValueError(expected("sinks", "finite logits or -inf", bad[0], advice))
    _within("sinks", values[np.isfinite(values)], reach, advice)
    return values


def _alibi(alibi: Any, shape: Shape, reach: float) -> NDArray[np.float64] | None:
    if alibi is None or alibi is False:
        return None
    if alibi is True:
        return alibi_slopes(shape.H)
    what, advice = "one finite slope per query head", "Pass True for the standard slopes"
    slopes = per_head("alibi", alibi, shape.H, what, advice)
    _within("alibi", slopes, reach, advice)
    return slopes


def _within(argument: str, values: NDArray[np.float64], reach: float, advice: str) -> None:
    bad = values[~(np.abs(values) <= reach)]
    if bad.size:
        what = f"finite numbers of magnitude up to {reach:.3g}"
        raise LevelheadValueError(expected(argument, what, bad[0], advice))


def _key_lengths(key_lengths: Any, shape: Shape) -> NDArray[np.int64]:
    what, advice = "integers", "Give the number of keys of each batch row"
    lengths = integers("key_lengths", key_lengths, shape.batch or (1,), what, advice)
    bad = lengths[(lengths < 0) | (lengths > shape.S)]
    if bad.size:
        what = f"lengths from 0 to the {shape.S} keys of k"
        raise LevelheadValueError(expected("key_lengths", what, bad[0], advice))
    return lengths.reshape(shape.B)


def _query_start(query_start: Any, shape: Shape) -> NDArray[np.int64]:
    if query_start is None:
        return np.full(shape.B, shape.S - shape.T, np.int64)
    what, advice = "integers", "Give the position of the first query, one or one per batch row"
    start = integers("query_start", query_start, shape.batch or (1,), what, advice)
    bad = start[(start < -_FAR) | (start > _FAR)]
    if bad.size:
        what = "positions between -2**61 and 2**61"
        raise LevelheadValueError(expected("query_start", what, bad[0], advice))
    return start.reshape(shape.B)


def _dropout(dropout: Any) -> float:
    what, advice = "a rate with 0 <= rate < 1", "Pass 0 for no dropout"
    rate = number("dropout", dropout, what, advice)
    if not 0 <= rate < 1:
        raise LevelheadValueError(expected("dropout", what, rate, advice))
    return rate


def _seed(seed: Any, rate: float) -> int:
    if seed is None:
        return secrets.randbits(64) if rate > 0 else 0
    what, advice = "an integer with 0 <= seed < 2**64", "Pass None for a fresh seed"
    value = integer("seed", seed, what, advice)
    if not 0 <= value < 2**64:
        raise LevelheadValueError(expected("seed", what, value, advice))
    return value
