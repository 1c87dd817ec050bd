"""The options of an attention call: names, types, defaults, documentation, checks, and their one normal form.

Callers pass `Options`, checked by `describe` into a `Scoring`. Every front end takes its options from here: signatures
and their documentation (`documented`), the core's keywords, PyTorch's operator schema, the distributed agreement, the
calls that a watch describes. A new option is a key of `Options`, an entry of `_MEANING`, and a field of `Scoring` with
its kind (`_BY_KIND`) and its check; then `reference.py` and the kernel.

The order, everywhere in levelhead: dot product, scale, softcap, bias (float mask) and ALiBi, hide (bool mask, causal,
window, lengths, segments), softmax with sinks. A logit of -inf is hidden, whatever made it so. This file computes no
logit and copies no mask.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any, NamedTuple, TypedDict, TypeVar

import numpy as np
from numpy.typing import NDArray

from levelhead.call.scaling import Scale, ScaleLike, filled, resolve
from levelhead.call.segments import alibi_slopes, segment_ids, segment_pair
from levelhead.call.shapes import Shape, shape_of
from levelhead.checks import as_array, broadcast, flag, integer, integers, number, per_head, refuse_any, short_repr
from levelhead.errors import bad_type, bad_value

__all__ = ["Options", "Scale", "ScaleLike", "Scoring", "Shape", "alibi_slopes", "describe", "documented", "segment_ids"]
__all__ += ["shape_of"]

F = TypeVar("F", bound=Callable[..., Any])

# Positions stay this far from the ends of int64, so that p + T, p - left and p - j cannot wrap.
_FAR = 2**61
_TINY = float(np.finfo(np.float32).tiny)
_HUGE = float(np.finfo(np.float32).max)
_HUGEST = float(np.finfo(np.float64).max)


class _Hiding(TypedDict, total=False):
    mask: Any
    key_lengths: Any
    query_lengths: Any


class _Fast(TypedDict, total=False):
    scale: Any
    causal: bool


class _Further(TypedDict, total=False):
    window: tuple[int | None, int | None] | None
    softcap: float | None
    sinks: Any
    alibi: Any
    segments: Any
    query_start: Any


class _Chance(TypedDict, total=False):
    dropout: float
    seed: int | None


class AdditiveOptions(_Hiding, total=False):
    """Those of additive attention, which has no scale."""

    causal: bool


class PerCallOptions(_Hiding, total=False):
    """Those of a module's call; the module itself has the others."""

    segments: Any


class SlowOptions(_Hiding, _Further, _Chance, total=False):
    """Those that the fast call does not take: all but scale and causal."""


class CertainOptions(_Fast, _Hiding, _Further, total=False):
    """Those without chance, which `explain` takes."""


class Options(_Fast, _Hiding, _Further, _Chance, total=False):
    """What callers pass, by keyword; what is left out has the default of `DEFAULTS`."""


# How `help()` documents each option.
_MEANING = {
    "scale": "None for 1/√d_k, a number, one per head, or a rule of `levelhead.scaling`.",
    "causal": "hide keys after the query's position p.",
    "window": "(left, right), keep p - left <= j <= p + right; None on a side: no limit.",
    "mask": "bool (True: may attend) or additive float, broadcastable to (..., H, T, S).",
    "softcap": "c > 0 bounds the scaled logits, c · tanh(s / c).",
    "sinks": "(H,) one extra logit per head in the denominator.",
    "alibi": "(H,) slopes, or True for the standard ones; adds -slope · |p - j|.",
    "key_lengths": "how many keys of each batch row exist.",
    "query_lengths": "how many queries of each batch row exist; rows beyond are 0 and count nowhere.",
    "segments": "(query ids, key ids) or one array for both; attention stays within an id.",
    "query_start": "position p of the first query, one or per batch row; default S - T.",
    "dropout": "share of weights dropped, a function of `seed` and positions alone.",
    "seed": "makes dropout reproducible.",
}
NAMES = tuple(_MEANING)
PER_CALL, ADDITIVE, CERTAIN = (
    tuple(name for name in NAMES if name in kind.__annotations__)
    for kind in (PerCallOptions, AdditiveOptions, CertainOptions)
)
ARRAYS = ("scale", "sinks", "alibi", "key_lengths", "query_lengths", "segments", "query_start")  # may be arrays
DEFAULTS: Mapping[str, Any] = dict.fromkeys(NAMES) | {"causal": False, "dropout": 0.0}

# What a field of `Scoring` is, for code that treats all options alike.
HEADS, BATCH, TOKENS, MASK, SEED = "one per head", "one per batch row", "one per token", "mask", "seed"
FLAG, INTEGER, NUMBER, RATE = "flag", "integer", "number", "rate"


class Scoring(NamedTuple):
    """Every option of a call in one normal form; None means absent.

    Arrays are NumPy's, or PyTorch's where a tensor call is described. Tensor fields come first, in the order of
    PyTorch's operators; B is all leading dimensions as one.
    """

    scale: Any  # (H,) float64: s = scale[h] · q·k
    mask: Any = None  # bool (True: visible) or additive, broadcastable to batch + (H, T, S); a view, never copied
    sinks: Any = None  # (H,)
    alibi: Any = None  # (H,) slopes
    key_lengths: Any = None  # (B,)
    query_lengths: Any = None  # (B,)
    query_segments: Any = None  # (B, T)
    key_segments: Any = None  # (B, S)
    query_start: Any = None  # (B,); None: 0
    seed: Any = None  # of dropout; a number, or a tensor of shape ()
    cosine: bool = False  # rows of q and k are divided by their norms first; a zero row stays zero
    log_n: bool = False  # each row also times ln(keys left to it by position and segment)
    causal: bool = False
    left: int | None = None  # window: keys from p - left ...
    right: int | None = None  # ... to p + right
    softcap: float | None = None
    dropout: float = 0.0

    def keywords(self) -> dict[str, Any]:
        """The fields that say something, by name: what is absent or off is left out."""
        present = {name: x for name, x in zip(self._fields, self, strict=True) if x is not None and x is not False}
        if not self.dropout:
            del present["dropout"]
            present.pop("seed", None)
        return present

    def positions(self, index: Any) -> Any:
        """Where queries with these indices in their sequence, (T,) or (B, T), sit, (B, T); (1, T) if all rows start
        at 0."""
        index = index if index.ndim == 2 else index[None]
        return index if self.query_start is None else self.query_start[:, None] + index

    def reach(self, index: Any) -> tuple[Any, Any]:
        """The first and last key positions that queries (T,) may see, (B, T) each; last < first where there is none."""
        xp = namespace(index)
        p = self.positions(index)
        far = 2 * _FAR if str(index.dtype).endswith("64") else 2**30  # JAX has 32 bits unless it is told otherwise
        first, last = p * 0 - far, p * 0 + far
        if self.left is not None:
            first = p - self.left
        if self.right is not None:
            last = p + self.right
        if self.causal:
            last = xp.minimum(last, p)
        if self.key_lengths is not None:
            last = xp.minimum(last, self.key_lengths[:, None] - 1)
        if self.query_lengths is not None:
            last = xp.where(self.exists(index), last, first - 1)
        return first, last

    def exists(self, index: Any) -> Any:
        """Which queries (T,) of each batch row exist, (B, T); None: all."""
        return None if self.query_lengths is None else index < self.query_lengths[:, None]

    def existing_rows(self, shape: Shape, index: Any = None) -> Any:
        """`exists` as it broadcasts to rows (..., H, T) of that shape; None: all. `index`: the queries that q holds."""
        if self.query_lengths is None:
            return None
        exists = self.exists(np.arange(shape.T) if index is None else index)
        if exists.all():
            return None
        return exists.reshape((*shape.batch, 1, shape.T)) if shape.lead else exists[0]

    def of_rows(self, rows: Any) -> Scoring:
        """The options for the queries with these indices alone."""
        mask, ids = self.mask, self.query_segments
        if mask is not None and mask.ndim > 1 and mask.shape[-2] > 1:
            mask = mask[..., rows, :]
        return self._replace(mask=mask, query_segments=None if ids is None else ids[:, rows])

    def capped(self, bound: Any) -> Any:
        """What bounds the scaled logits, if `bound` does before the cap."""
        return bound if self.softcap is None else namespace(bound).clip(bound, None, self.softcap)

    def visible(self, index: Any, j: Any) -> Any:
        """Which keys at positions j (S,) queries (T,) may see by position and segment, (B, T, S)."""
        first, last = self.reach(index)
        seen = (j >= first[:, :, None]) & (j <= last[:, :, None])
        if self.query_segments is not None:
            seen = seen & (self.query_segments[:, :, None] == self.key_segments[:, None, :])
        return seen


_BY_KIND = {
    HEADS: ("scale", "sinks", "alibi"),
    BATCH: ("key_lengths", "query_lengths", "query_start"),
    TOKENS: ("query_segments", "key_segments"),
    MASK: ("mask",),
    SEED: ("seed",),
    FLAG: ("cosine", "log_n", "causal"),
    INTEGER: ("left", "right"),
    NUMBER: ("softcap",),
    RATE: ("dropout",),
}
KINDS: Mapping[str, str] = {name: kind for kind, names in _BY_KIND.items() for name in names}

# How `explain` words what a call's options do between scale and softmax, in that order: when, and what.
CHANGES: Mapping[str, tuple[Callable[[Scoring], bool], str]] = {
    "softcap": (lambda s: s.softcap is not None, "c · tanh(s / c) bounds them"),
    "bias": (lambda s: s.mask is not None and s.mask.dtype != bool, "a bias is added"),
    "ALiBi": (lambda s: s.alibi is not None, "a slope times the distance is subtracted"),
    "mask": (lambda s: s.mask is not None and s.mask.dtype == bool, "masked keys are hidden"),
    "causal": (lambda s: s.causal, "later keys are hidden"),
    "window": (lambda s: s.left is not None or s.right is not None, "keys outside the window are hidden"),
    "lengths": (lambda s: s.key_lengths is not None, "keys beyond the length are hidden"),
    "queries": (lambda s: s.query_lengths is not None, "queries beyond the length see nothing"),
    "segments": (lambda s: s.key_segments is not None, "keys of other segments are hidden"),
    "sinks": (lambda s: s.sinks is not None, "a sink will join the softmax"),
}


@cache
def fields(*kinds: str) -> tuple[str, ...]:
    """The fields of `Scoring` of these kinds, in its order."""
    return tuple(name for name in Scoring._fields if KINDS[name] in kinds)


def namespace(x: Any) -> Any:
    """The module of an array's functions: NumPy, torch or jax.numpy."""
    name = type(x).__module__.partition(".")[0]
    return sys.modules["jax.numpy" if name.startswith("jax") else name]


# ---- signatures


def documented(only: Collection[str] = NAMES) -> Callable[[F], F]:
    """Gives a function that takes **options an explicit signature, and its docstring the options' meaning.

    The options stand before the function's other keywords; it may name some of them itself. In the docstring they
    replace the line `{options}`. The function itself refuses other names, through `known`.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        own = [x for x in signature.parameters.values() if x.kind is not x.VAR_KEYWORD and x.name not in NAMES]
        first = [x for x in own if x.kind is not x.KEYWORD_ONLY]
        listed = [_parameter(name) for name in NAMES if name in only]
        parameters = [*first, *listed, *(x for x in own if x not in first)]
        vars(function)["__signature__"] = signature.replace(parameters=parameters)
        if function.__doc__:
            indent = re.search(r"^ *(?=\{options\})", function.__doc__, re.MULTILINE)
            between = "\n" + (indent[0] if indent else "")
            lines = between.join(f"{name}: {_MEANING[name]}" for name in NAMES if name in only)
            function.__doc__ = function.__doc__.replace("{options}", lines)
        return function

    return decorate


def _parameter(name: str) -> inspect.Parameter:
    kind = Options.__annotations__[name]
    annotation = getattr(kind, "__forward_arg__", kind)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=DEFAULTS[name], annotation=annotation)


def logit_cap(options: Mapping[str, Any]) -> float | None:
    """What bounds the logits of a call, from its options or its fields."""
    cap = options.get("softcap")
    return None if cap is None else float(cap)


def known(function: str, options: Mapping[str, Any], only: Collection[str] = NAMES) -> None:
    """Refuses keywords that are no options, in Python's own words."""
    for name in options:
        if name not in only:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


# ---- from options to the normal form


def describe(shape: Shape, *, dtype_name: str = "float32", queries: int | None = None, **options: Any) -> Scoring:
    """Checks every option against `shape` and brings it to its normal form.

    Args:
        shape: the sizes of q, k and v, from `shape_of`.
        dtype_name: the dtype of q; a float mask has this dtype or float32. With "bfloat16" a uint16 mask is read as
            bfloat16 bits, so integer masks are refused before this call.
        queries: of the whole sequence, where q holds a part of it.
        options: as in `Options`.
    """
    known("describe", options)
    given = {**DEFAULTS, **options}
    left, right = _window(given["window"])
    advice = "Pass 0 for no dropout"
    rate = number("dropout", given["dropout"], "a rate with 0 <= rate < 1", advice, lambda x: 0 <= x < 1)
    segments = given["segments"]
    query_segments, key_segments = (None, None) if segments is None else segment_pair(segments, shape)
    # Half types compute in float32, where a larger number would become inf.
    reach = _HUGEST if dtype_name == "float64" else _HUGE
    scale = resolve(given["scale"], heads=shape.H, d_k=shape.D)
    if given["scale"] is not None:
        _within("scale", scale.factor, reach, "Scale q or k down instead")
    return Scoring(
        scale=scale.factor,
        cosine=scale.cosine,
        log_n=scale.log_n,
        causal=flag("causal", given["causal"]),
        left=left,
        right=right,
        mask=None if given["mask"] is None else _mask(given["mask"], shape, dtype_name),
        softcap=None if given["softcap"] is None else _softcap(given["softcap"], reach),
        sinks=None if given["sinks"] is None else _sinks(given["sinks"], shape, reach),
        alibi=_alibi(given["alibi"], shape, reach),
        key_lengths=_lengths("key_lengths", given["key_lengths"], shape, shape.S),
        query_lengths=_lengths("query_lengths", given["query_lengths"], shape, queries or shape.T),
        query_segments=query_segments,
        key_segments=key_segments,
        query_start=_query_start(given["query_start"], shape),
        dropout=rate,
        seed=_seed(given["seed"], rate),
    )


def _window(window: Any) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    if not isinstance(window, tuple | list) or len(window) != 2:
        error = bad_value if isinstance(window, tuple | list) else bad_type
        raise error(
            "window", "(left, right)", short_repr(window), "Give how many keys to either side, None for no limit"
        )
    return _reach("window left", window[0]), _reach("window right", window[1])


def _reach(argument: str, value: Any) -> int | None:
    if value is None:
        return None
    size = integer(argument, value, "None or an integer of at least 0", "Pass None for no limit", lambda n: n >= 0)
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
        raise bad_type("mask", wanted, f"dtype {array.dtype}", advice)
    if floats and name not in (dtype_name, "float32"):
        raise bad_type("mask", wanted, f"dtype {name}", advice)
    if name == "bfloat16":
        array = array.view(np.uint16)
    full = (*shape.batch, shape.H, shape.T, shape.S)
    advice = "Its axes, from the last, are keys, queries, heads, batch; each full or of size 1"
    return broadcast("mask", array, full, "a mask", advice)


def _softcap(softcap: Any, reach: float) -> float:
    cap = number("softcap", softcap, "a finite number above 0", "Pass None for no cap", lambda x: x > 0)
    if reach == _HUGE and not _TINY <= cap <= _HUGE:
        wanted = f"a number between {_TINY:.3g} and {_HUGE:.3g}"
        raise bad_value("softcap", wanted, cap, "Half types compute in float32")
    return cap


def _sinks(sinks: Any, shape: Shape, reach: float) -> NDArray[np.float64]:
    advice = "Use -inf for a head without a sink"
    values = per_head("sinks", sinks, shape.H, "one logit per query head", advice)
    refuse_any("sinks", values[~(values < np.inf)], "finite logits or -inf", advice)
    _within("sinks", values[values > -np.inf], reach, advice)
    return values


def _alibi(alibi: Any, shape: Shape, reach: float) -> NDArray[np.float64] | None:
    if alibi is None or alibi is False:
        return None
    if alibi is True:
        return alibi_slopes(shape.H)
    advice = "Pass True for the standard slopes"
    slopes = per_head("alibi", alibi, shape.H, "one finite slope per query head", advice)
    _within("alibi", slopes, reach, advice)
    return slopes


def _within(argument: str, values: NDArray[np.float64], reach: float, advice: str) -> None:
    within = np.abs(values) <= reach
    if not within.all():
        raise bad_value(argument, f"finite numbers of magnitude up to {reach:.3g}", values[~within][0], advice)


def _lengths(argument: str, lengths: Any, shape: Shape, most: int) -> NDArray[np.int64] | None:
    """How many tokens of each batch row exist."""
    if lengths is None:
        return None
    tokens, array = ("keys", "k") if argument == "key_lengths" else ("queries", "q")
    advice = f"Give the number of {tokens} of each batch row"
    values = integers(argument, lengths, shape.batch or (1,), "integers", advice)
    outside = values[(values < 0) | (values > most)]
    refuse_any(argument, outside, f"lengths from 0 to the {most} {tokens} of {array}", advice)
    return values.reshape(shape.B)


def _query_start(query_start: Any, shape: Shape) -> NDArray[np.int64]:
    if query_start is None:
        return filled(shape.B, shape.S - shape.T, np.int64)
    advice = "Give the position of the first query, one or one per batch row"
    start = integers("query_start", query_start, shape.batch or (1,), "integers", advice)
    refuse_any("query_start", start[(start < -_FAR) | (start > _FAR)], "positions between -2**61 and 2**61", advice)
    return start.reshape(shape.B)


def _seed(seed: Any, rate: float) -> int:
    if seed is None:
        return int.from_bytes(os.urandom(8), "little") if rate > 0 else 0
    what = "an integer with 0 <= seed < 2**64"
    return integer("seed", seed, what, "Pass None for a fresh seed", lambda n: 0 <= n < 2**64)
